"""Taking over by steps holds its error over all steps and looks, and an equal apprentice takes over.

python -m tests.store.evidence.test_takeover 1000        # so many comparisons of each kind: an hour on one core
"""

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Callable

import duckdb
import msgspec
import pytest

from pipeline.config import ConfigError
from pipeline.names import split_point
from store.evidence import decide, sequential
from store.evidence.cascade import THRESHOLDS, find_threshold
from store.evidence.comparison import (
    Cascade,
    Evidence,
    Finding,
    Guard,
    Metric,
    Part,
    Plan,
    Share,
    _compare_pairs,
    read_evidence,
    verdict,
)
from tests.store.evidence.kit import BEGAN, Run, insert, micros, record
from tests.store.evidence.test_error import SIDES, Draw, crashes, equal, late_feedback

MARGIN, ALPHA, RUNS = 0.1, 0.05, 6000
_HALVINGS = 10
_LOOK_S, _A_MINUTE, _DEADLINE_S = 600.0, 40, 1200.0
APPRENTICE, MASTER = "m@2", "outside:master"
PLAN = Plan(
    metric=Metric(sql="coalesce(reward, feedback['solved'])"),
    margin=MARGIN,
    steps=(5, 25),
    guards=(Guard(sql="cost_usd", high=0.1), Guard(sql="calls_s", high=60, margin=5)),
    alpha=ALPHA,
    deadline_s=_DEADLINE_S,
    max_pairs=100_000,
)


class Store:
    """Reads the evidence as `journeywork decide` does, of runs that were put into its tables."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        for table in ("trajectories", "signals", "rollout_opened"):
            connection.execute(f"DELETE FROM {table}")

    def add(self, runs: list[Run]) -> None:
        record(self.connection, runs, lambda run: {"model": "m" if run.own else "master"})
        asked = {"project": "p", "asked": "master"}
        pinned = [{**asked, "trajectory": run.name, "pinned": APPRENTICE if run.own else ""} for run in runs]
        insert(self.connection, rollout_opened=pinned)

    def read(self, evidence: Evidence, now: float) -> Evidence:
        return read_evidence(self.connection, "p", evidence, micros(now))


class Plain:
    """Reads the same evidence without SQL, for thousands of comparisons."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def add(self, runs: list[Run]) -> None:
        self.runs += runs

    def read(self, evidence: Evidence, now: float) -> Evidence:
        begins = [share.since / 1e6 - BEGAN.timestamp() for share in evidence.shares]
        findings = []
        for number, metric in enumerate((PLAN.metric, *PLAN.guards)):
            sides: list[list[list[tuple[bool, float | None]]]] = [[[], []] for _ in begins]
            for run in self.runs:
                late = run.opened + _DEADLINE_S
                value, known = ((run.won, run.known), (run.cost_usd, run.ended), (run.calls_s, run.ended))[number]
                at = sum(run.opened > begin for begin in begins) - 1
                sides[at][not run.own].append((late <= now, value if known <= min(late, now) else None))
            parts = [Part(share.percent, *of_share) for share, of_share in zip(evidence.shares, sides, strict=True)]
            findings.append(_compare_pairs(metric, parts, PLAN.alpha))
        found = msgspec.structs.replace(evidence, until=micros(now), findings=tuple(findings))
        return msgspec.structs.replace(found, verdict=verdict(found))


def take_over(store: Store | Plain, rng: random.Random, draw: Draw, wins: tuple[float, float]) -> tuple[Evidence, int]:
    """Play one comparison as `journeywork decide watch` decides it. `wins`: shares of the apprentice's and of the
    master's runs that win. Return the last evidence, and how many runs were opened by then."""
    now, number, opened = 0.0, 0, rng.expovariate(_A_MINUTE / 60)
    evidence = Evidence(plan=PLAN, candidate=APPRENTICE, control=MASTER, shares=(Share(percent=5, since=micros(0)),))
    while True:
        runs = []
        now += _LOOK_S
        while opened <= now and number < RUNS:
            own = split_point(f"{rng.random()}") < evidence.shares[-1].percent
            won = float(rng.random() < wins[not own])
            seconds, known, outcome = draw(rng, own, won)
            cost, calls_s = 0.0 if own else min(rng.expovariate(1 / 0.03), 0.1), min(rng.expovariate(1 / 10), 60)
            runs.append(Run(f"r{number}", own, opened, opened + seconds, opened + known, outcome, won, cost, calls_s))
            number += 1
            opened += rng.expovariate(_A_MINUTE / 60)
        store.add(runs)
        found = store.read(evidence, now)
        if found.verdict in ("promote", "rollback") or (number == RUNS and now > opened + _DEADLINE_S):
            return found, number
        if found.verdict == "raise":
            share = Share(percent=found.next_percent(), since=micros(now))
            evidence = msgspec.structs.replace(evidence, shares=(*evidence.shares, share))


def _verdicts(draw: Draw, wins: tuple[float, float], count: int) -> tuple[Counter[str], list[int]]:
    """Return how often each verdict came, and after how many runs."""
    rng = random.Random(f"{draw.__name__}/{wins}")
    played = [take_over(Plain(), rng, draw, wins) for _ in range(count)]
    return Counter(found.verdict for found, _ in played), sorted(runs for _, runs in played)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of intervals to 0.001 of the range, on the safe side."""
    monkeypatch.setattr(sequential, "_HALVINGS", _HALVINGS)


@pytest.mark.parametrize(("draw", "wins"), [(equal, (0.8, 0.8)), (late_feedback, (0.7, 0.8)), (crashes, (0.8, 0.8))])
def test_the_store_says_the_same_as_the_simulation(
    connection: duckdb.DuckDBPyConnection, draw: Draw, wins: tuple[float, float]
) -> None:
    found, same = (take_over(results, random.Random(1), draw, wins) for results in (Store(connection), Plain()))
    # Python 3.12 and later sum floats with less rounding than DuckDB.
    assert _rounded(found) == _rounded(same)


def _rounded(found: object) -> object:
    return msgspec.json.Decoder(float_hook=lambda text: round(float(text), 9)).decode(msgspec.json.encode(found))


@pytest.mark.usefixtures("_quick")
def test_an_equal_apprentice_takes_over_by_steps() -> None:
    played = [take_over(Plain(), random.Random(seed), equal, (0.8, 0.8))[0] for seed in range(10)]
    promoted = [[share.percent for share in found.shares] for found in played if found.verdict == "promote"]
    assert promoted.count([5, 25]) >= 8


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("draw", [equal, late_feedback])
def test_an_apprentice_worse_by_the_margin_is_seldom_promoted(draw: Draw) -> None:
    """More than 2 of 10 would have a probability below 1 in 80."""
    verdicts, _ = _verdicts(draw, (0.7, 0.8), 10)
    assert verdicts["promote"] <= 2


def test_a_share_is_raised_by_what_it_may_cost() -> None:
    """A quarter of the runs may be worse by four times the margin of all; each guard likewise."""

    def finding(low: float, high: float) -> Finding:
        means = {"candidate_mean": 0.0, "control_mean": 0.0, "difference": 0.0}
        return Finding(sql="", candidate_runs=9, control_runs=9, pairs=9, low=low, high=high, **means)

    def of(metric: tuple[float, float], cost: tuple[float, float], percent: float) -> str:
        found = (finding(*metric), finding(*cost), finding(-60, 4))
        shares = (Share(percent=percent),)
        return verdict(Evidence(plan=PLAN, candidate=APPRENTICE, control=MASTER, shares=shares, findings=found))

    assert of((-0.39, 0.5), (-0.1, 0.0), 5) == "raise"
    assert of((-0.41, 0.5), (-0.1, 0.0), 5) == "continue"
    assert of((-0.39, 0.5), (-0.1, 0.0), 25) == "continue"
    assert of((-0.09, 0.5), (-0.1, 0.0), 25) == "promote"
    assert of((-0.09, 0.5), (-0.1, 0.01), 25) == "continue"
    assert of((-0.3, -0.01), (-0.1, 0.0), 5) == "rollback"
    # Worse by less than the margin is what the plan allows, also while a guard is not known yet.
    assert of((-0.09, -0.01), (-0.1, 0.0), 25) == "promote"
    assert of((-0.09, -0.01), (-0.1, 0.01), 25) == "continue"
    assert of((-0.3, 0.5), (0.01, 0.1), 5) == "rollback"


def test_pairs_of_a_share_wait_for_all_runs_of_the_share_before(connection: duckdb.DuckDBPyConnection) -> None:
    shares = (Share(percent=50), Share(percent=25, since=100))
    begun = Evidence(plan=msgspec.structs.replace(PLAN, guards=()), candidate=APPRENTICE, control=MASTER, shares=shares)
    rows = [(own, at, at + 1, "") for at in (1, 101) for own in (True, *[False] * (1 if at == 1 else 3))]
    rows += [(True, 2, 2 * 10**9, "g"), (False, 3, 4, "g")]  # of a group, the first run counts
    for number, (own, began, ended, group) in enumerate(rows):
        connection.execute(
            "INSERT INTO trajectories (project, model, trajectory, outcome, opened_at, completed_at, reward, group_id) "
            "VALUES ('p', ?, ?, 'scored', make_timestamptz(?), make_timestamptz(?), 1, ?)",
            ["m" if own else "master", f"r{number}", began, ended, group],
        )
        connection.execute(
            "INSERT INTO rollout_opened VALUES ('p', ?, ?, 'master')", [f"r{number}", APPRENTICE if own else ""]
        )
    (waiting,) = read_evidence(connection, "p", begun, 200).findings
    assert (waiting.pairs, waiting.candidate_runs, waiting.control_runs) == (1, 1, 1)
    (known,) = read_evidence(connection, "p", begun, round(_DEADLINE_S * 1e6) + 2).findings
    assert (known.pairs, known.candidate_runs, known.control_runs, known.candidate_late) == (2, 3, 4, 1)


# -- the cascade ------------------------------------------------------------------------------------------------------

Agrees = Callable[[float], float]
"""From a mean logprob, the probability that the answer agrees."""


def _pairs(rng: random.Random, count: int, agrees: Agrees) -> list[tuple[float, bool]]:
    logprobs = [-rng.expovariate(2) for _ in range(count)]
    return [(logprob, rng.random() < agrees(logprob)) for logprob in logprobs]


@pytest.mark.parametrize(
    ("agrees", "found"),
    [
        (lambda x: 0.995 if x > -0.3 else 0.7, True),
        (lambda x: 1 / (1 + math.exp(-6 * (x + 0.8))), True),
        (lambda x: 0.94, False),  # the logprob says nothing, and the quality is not kept by any
    ],
    ids=["step", "slope", "flat"],
)
def test_the_cascade_keeps_its_quality_on_held_out_calls(agrees: Agrees, found: bool) -> None:
    """The share of held-out calls that agree is that of 20,000, so below the quality by no more than its own chance."""
    rng, below, shown = random.Random(7), 0, 0
    for _ in range(40):
        cascade = find_threshold(_pairs(rng, 1000, agrees), 0.95)
        if cascade is None:
            continue
        held_out = [agreed for logprob, agreed in _pairs(rng, 20_000, agrees) if logprob >= cascade.min_logprob]
        below += sum(held_out) / len(held_out) < 0.95 - 0.005
        shown += len(held_out)
    assert below <= 5  # more would have a probability below 1 in 50 at an error of 5 %
    assert (shown > 0.1 * 40 * 20_000) == found


def test_few_pairs_show_no_threshold() -> None:
    assert find_threshold([(-0.0001, True)] * 100, 0.95) is None
    enough = find_threshold([(-0.0001, True)] * 200, 0.95)
    assert enough is not None
    assert (enough.min_logprob, enough.shown, enough.agreed) == (THRESHOLDS[-1], 200, 200)


def test_steps_and_pairs_that_make_no_sense_are_refused(
    connection: duckdb.DuckDBPyConnection, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decide._parse_steps("5,25") == (5, 25)
    for wrong in ("25,5", "5,5", "0,5", "5,100", "a", "5,"):
        with pytest.raises(ConfigError, match="rising shares below 100"):
            decide._parse_steps(wrong)

    def cascade(quality: float | None, pairs: str | None) -> Cascade | None:
        return decide._find_cascade(argparse.Namespace(quality=quality, pairs=pairs, alpha=0.05), connection)

    assert cascade(None, None) is None
    same = "SELECT -0.5, true FROM range(200)"
    found = cascade(0.95, same)
    assert found is not None
    assert found.min_logprob == THRESHOLDS[-1]
    assert "are shown: 200 of 200 pairs, of which 200 agree" in capsys.readouterr().out
    for quality, pairs, said in (
        (0.95, None, "comes with --pairs"),
        (None, same, "comes with --pairs"),
        (1.0, same, "a probability below 1"),
        (0.95, "SELECT 1", "does not give numbers and truth values"),
        (0.95, "FROM nowhere", "does not give numbers and truth values"),
        (0.95, "SELECT -0.5, true FROM range(20)", "no logprob keeps a quality of 0.95: of 20 pairs 20 agree"),
    ):
        with pytest.raises(ConfigError, match=said):
            cascade(quality, pairs)


def main(count: int) -> None:
    """Print how many apprentices are promoted: equal ones, and such as are worse by the margin."""
    sequential._HALVINGS = _HALVINGS
    verdicts, runs = _verdicts(equal, (0.8, 0.8), count)
    half = f"half decided within {runs[count // 2]:,} runs"
    sys.stdout.write(f"equal: {verdicts['promote']} of {count} promoted; {half}\n")
    for draw in (equal, *SIDES):
        verdicts, _ = _verdicts(draw, (0.7, 0.8), count)
        sys.stdout.write(f"worse by the margin, {draw.__name__}: {verdicts['promote']} of {count} promoted\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
