"""A comparison holds its error, whatever decides how long a run takes and whether its result comes."""

import math
import random
from collections.abc import Callable
from typing import Any

import duckdb
import pytest

from pipeline.names import split_point
from store.evidence.comparison import Evidence, Guard, Metric, Plan, Share, read_evidence
from tests.store.evidence.kit import Run, micros, record

COMPARISONS, RUNS = 100, 240
_DEADLINE_S = 1200.0
_END = micros(2 * 86_400)

Draw = Callable[[random.Random, bool, float], tuple[float, float, str]]
"""From a generator of numbers, whether it is the candidate's run, and its result: its seconds (infinite: it does not
end), those until its result is known (infinite: never), and its outcome."""


def _mean_of(seconds: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.expovariate(1 / seconds)


def equal(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """Both sides take equally long."""
    seconds = _mean_of(300)(rng)
    return seconds, seconds, "scored"


def loops(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """The candidate loops before it fails: three times as long, which is late at times."""
    seconds = _mean_of(900 if candidate and not won else 300)(rng)
    return seconds, seconds, "scored"


def late_feedback(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """Users of the candidate think about what failed."""
    seconds = _mean_of(60)(rng)
    return seconds, seconds + _mean_of(1500 if candidate and not won else 120)(rng), "scored"


def silent_if_it_failed(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """Half of the candidate's users whose task failed leave."""
    seconds = _mean_of(60)(rng)
    silent = candidate and not won and rng.random() < 0.5
    return seconds, math.inf if silent else seconds + 10, "scored"


def silent_control(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """A third of the control's users say nothing, whatever came out."""
    seconds = _mean_of(60)(rng)
    return seconds, math.inf if not candidate and rng.random() < 1 / 3 else seconds + 10, "scored"


def crashes(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
    """Two thirds of the candidate's failures end without a result."""
    lost = candidate and not won and rng.random() < 2 / 3
    seconds = _mean_of(60)(rng)
    return seconds, math.inf if lost else seconds, "no_result" if lost else "scored"


def _play(
    connection: duckdb.DuckDBPyConnection, draw: Draw, percent: float, wins: tuple[float, float], count: int
) -> None:
    """Record `count` comparisons, a project each, with 40 runs a minute. `wins`: shares of the candidate's and of the
    control's runs that win."""

    def of_version(run: Run) -> dict[str, Any]:
        step = None if run.ended == math.inf else 2 if run.own else 1
        return {"model": "m", "first_step": step, "last_step": step, "exchanges": step and 1}

    rng = random.Random(f"{draw.__name__}/{percent}/{wins}")
    for project in range(count):
        runs, opened = [], 0.0
        for number in range(RUNS):
            opened += rng.expovariate(40 / 60)
            candidate = split_point(f"{project}-{number}") < percent
            won = float(rng.random() < wins[not candidate])
            seconds, known, outcome = draw(rng, candidate, won)
            runs.append(Run(f"{project}-{number}", candidate, opened, opened + seconds, opened + known, outcome, won))
        record(connection, runs, of_version, str(project))


def _begun(percent: float) -> Evidence:
    solved = "coalesce(reward, feedback['solved'])"
    plan = Plan(metric=Metric(sql=solved), guards=(Guard(sql=f"1 - {solved}", worse="higher"),), deadline_s=_DEADLINE_S)
    return Evidence(plan=plan, candidate="m@2", control="m@1", shares=(Share(percent=percent),))


SIDES = [loops, late_feedback, silent_if_it_failed, silent_control, crashes]


@pytest.mark.parametrize(
    ("draw", "percent"),
    [(equal, 50), *((draw, 50) for draw in SIDES), (loops, 20), (silent_control, 80)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_equal_versions_are_seldom_told_apart(
    connection: duckdb.DuckDBPyConnection, draw: Draw, percent: float
) -> None:
    """An interval lies in those before it, and a look adds pairs to those before it (`test_comparison`), so the last
    look tells of every look. More than 12 of 100 would have a probability below 1 in 500 at 5 %."""
    _play(connection, draw, percent, (0.5, 0.5), COMPARISONS)
    missed = [0, 0]
    for project in range(COMPARISONS):
        found = read_evidence(connection, str(project), _begun(percent), _END)
        for number, finding in enumerate(found.findings):
            missed[number] += not finding.low <= 0 <= finding.high
            assert finding.pairs >= 25
    assert max(missed) <= 12


def test_a_better_version_is_found_where_some_users_are_silent(connection: duckdb.DuckDBPyConnection) -> None:
    def some_silent(rng: random.Random, candidate: bool, won: float) -> tuple[float, float, str]:
        seconds = _mean_of(900 if candidate and not won else 300)(rng)
        return seconds, math.inf if rng.random() < 0.05 else seconds + 10, "scored"

    _play(connection, some_silent, 50, (0.9, 0.4), 20)
    found = [read_evidence(connection, str(project), _begun(50), _END) for project in range(20)]
    assert sum(evidence.verdict == "promote" for evidence in found) >= 16
    assert all(f.candidate_late and f.control_late for evidence in found for f in evidence.findings)
