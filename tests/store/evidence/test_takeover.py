"""Taking over by steps holds its error over all steps and looks, and an equal apprentice takes over."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest

from pipeline.names import split_point
from store.evidence.cascade import THRESHOLDS, find_threshold
from store.evidence.comparison import Evidence, Finding, Guard, Metric, Plan, Share, read_evidence, verdict
from tests.store.evidence.test_comparison import TABLES
from tests.store.evidence.test_error import (
    Draw,
    crashes,
    equal,
    late_feedback,
    loops,
    silent_control,
    silent_if_it_failed,
)

MARGIN, ALPHA, RUNS = 0.1, 0.05, 4000
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
_LOOK_S, _A_MINUTE, _DEADLINE_S = 600.0, 40, 1200.0
_SIDES: list[Draw] = [equal, loops, late_feedback, silent_if_it_failed, silent_control, crashes]
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


@pytest.fixture
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": "1"}) as found:
        found.execute(TABLES)
        yield found


def take_over(
    connection: duckdb.DuckDBPyConnection, rng: random.Random, draw: Draw, wins: tuple[float, float]
) -> tuple[str, int, list[float]]:
    """Play one comparison as `journeywork decide watch` decides it. `wins`: shares of the apprentice's and of the
    master's runs that win. Return the last verdict, the runs that were opened by then, and the shares."""
    for table in ("trajectories", "signals", "rollout_opened"):
        connection.execute(f"DELETE FROM {table}")
    now, number, opened = 0.0, 0, rng.expovariate(_A_MINUTE / 60)
    evidence = Evidence(plan=PLAN, candidate=APPRENTICE, control=MASTER, shares=(Share(percent=5, since=_micros(0)),))
    while True:
        runs, said = list[dict[str, Any]](), list[dict[str, Any]]()
        now += _LOOK_S
        while opened <= now and number < RUNS:
            own = split_point(f"{rng.random()}") < evidence.shares[-1].percent
            won = float(rng.random() < wins[not own])
            seconds, known, outcome = draw(rng, own, won)
            name, began = f"r{number}", _BEGAN + timedelta(seconds=opened)
            ends = seconds < math.inf
            runs.append(
                {
                    "project": "p",
                    "model": "m" if own else "master",
                    "trajectory": name,
                    "outcome": outcome if ends else "open",
                    "opened_at": began,
                    "completed_at": began + timedelta(seconds=seconds) if ends else None,
                    "reward": won if known == seconds < math.inf else None,
                    "cost_usd": 0.0 if own else min(rng.expovariate(1 / 0.03), 0.1),
                    "calls_s": min(rng.expovariate(1 / 10), 60),
                    "pinned": APPRENTICE if own else "",
                    "asked": "master",
                }
            )
            if seconds < known < math.inf:
                said.append(
                    {
                        "project": "p",
                        "trajectory": name,
                        "kind": "number",
                        "call": -1,
                        "name": "solved",
                        "value": won,
                        "given_at": began + timedelta(seconds=known),
                    }
                )
            number += 1
            opened += rng.expovariate(_A_MINUTE / 60)
        _insert(
            connection, "trajectories", [{k: v for k, v in r.items() if k not in ("pinned", "asked")} for r in runs]
        )
        _insert(
            connection,
            "rollout_opened",
            [{name: r[name] for name in ("project", "trajectory", "pinned", "asked")} for r in runs],
        )
        _insert(connection, "signals", said)
        found = read_evidence(connection, "p", evidence, _micros(now))
        if found.verdict in ("promote", "rollback") or (number == RUNS and now > opened + _DEADLINE_S):
            return found.verdict, number, [share.percent for share in found.shares]
        if found.verdict == "raise":
            share = Share(percent=found.next_percent(), since=_micros(now))
            evidence = msgspec.structs.replace(evidence, shares=(*evidence.shares, share))


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        given = pa.Table.from_pylist(rows)
        connection.register("given", given)
        connection.execute(f"INSERT INTO {table} BY NAME FROM given")
        connection.unregister("given")


def _micros(seconds: float) -> int:
    return int((_BEGAN.timestamp() + seconds) * 1e6)


def _verdicts(
    connection: duckdb.DuckDBPyConnection, draw: Draw, wins: tuple[float, float], count: int
) -> tuple[Counter[str], list[int]]:
    """Return how often each verdict came, and after how many runs."""
    rng = random.Random(f"{draw.__name__}/{wins}")
    played = [take_over(connection, rng, draw, wins) for _ in range(count)]
    return Counter(verdict for verdict, _, _ in played), sorted(runs for _, runs, _ in played)


def test_an_equal_apprentice_takes_over_by_steps(connection: duckdb.DuckDBPyConnection) -> None:
    played = [take_over(connection, random.Random(seed), equal, (0.8, 0.8)) for seed in range(5)]
    assert [shares for verdict, _, shares in played if verdict == "promote"].count([5, 25]) >= 4


@pytest.mark.parametrize("draw", [equal, late_feedback])
def test_an_apprentice_worse_by_the_margin_is_seldom_promoted(
    connection: duckdb.DuckDBPyConnection, draw: Draw
) -> None:
    """More than 1 of 5 would have a probability below 1 in 40."""
    verdicts, _ = _verdicts(connection, draw, (0.7, 0.8), 5)
    assert verdicts["promote"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("draw", _SIDES, ids=lambda draw: draw.__name__)
def test_1000_comparisons_hold_the_error(connection: duckdb.DuckDBPyConnection, draw: Draw) -> None:
    verdicts, _ = _verdicts(connection, draw, (0.7, 0.8), 1000)
    assert verdicts["promote"] <= ALPHA * 1000, verdicts


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_of_1000_equal_apprentices_four_fifths_take_over(connection: duckdb.DuckDBPyConnection) -> None:
    verdicts, runs = _verdicts(connection, equal, (0.8, 0.8), 1000)
    assert verdicts["promote"] >= 800, (verdicts, runs[500], runs[900])


def test_a_share_is_raised_by_what_it_may_cost() -> None:
    """A quarter of the runs may be worse by four times the margin of all; each guard likewise."""

    def finding(low: float, high: float) -> Finding:
        return Finding(
            sql="", candidate_runs=9, control_runs=9, candidate_mean=0, control_mean=0, pairs=9, difference=0, low=low,
            high=high,
        )  # fmt: skip

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
