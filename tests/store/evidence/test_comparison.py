"""What was seen at a look stays: the evidence of a time is a function of what was known then."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from unittest import mock

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.evidence import comparison
from store.evidence.comparison import Evidence, Guard, Metric, Plan, gather

_TABLES = """
CREATE TABLE trajectories (project TEXT, model TEXT, trajectory TEXT, outcome TEXT, opened_at TIMESTAMPTZ,
  completed_at TIMESTAMPTZ, first_step INT, last_step INT, reward DOUBLE, exchanges INT DEFAULT 1);
CREATE TABLE rewards (project TEXT, trajectory TEXT, branch TEXT, outcome TEXT, reward DOUBLE, scored_at TIMESTAMPTZ);
CREATE TABLE signals (project TEXT, trajectory TEXT, kind TEXT, "call" INT, name TEXT, value DOUBLE,
  given_at TIMESTAMPTZ);
CREATE TABLE rollout_opened (project TEXT, trajectory TEXT, pinned TEXT);
"""
_PLAN = Plan(
    metric=Metric(sql="feedback['solved']"),
    guards=(Guard(sql="reward", worse="lower"), Guard(sql="coalesce(judged, feedback['stars'])")),
)
_BEGUN = Evidence(plan=_PLAN, candidate="m@2", control="m@1", percent=50, since=0, until=0)
_END = 10**6

Said = tuple[int, int, str, float]  # time, number of the run, name ("" for a judge's reward), value
_TIME = st.integers(1, 40)
_RUN = st.tuples(st.sampled_from((1, 2)), _TIME)  # version, time at which it ended
_SAID = st.tuples(
    _TIME, st.integers(0, 11), st.sampled_from(("solved", "stars", "other", "")), st.floats(0, 1)
)


def _time(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1e6, UTC)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as found:
        found.execute(_TABLES)
        yield found


def _look(
    connection: duckdb.DuckDBPyConnection, runs: list[tuple[int, int]], said: list[Said], until: int
) -> tuple[Evidence, list[tuple[list[float], list[float]]]]:
    """Return the evidence at `until`, and for each metric the candidate's and the control's numbers in their order."""
    for table in ("trajectories", "rewards", "signals"):
        connection.execute(f"DELETE FROM {table}")
    for number, (step, ended) in enumerate(runs):
        values = ("p", "m", f"r{number}", "ok", _time(1), _time(ended), step, step, number / 20)
        connection.execute("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1)", values)
    for at, number, name, value in said:
        if name:
            given = ("p", f"r{number}", "number", -1, name, value, _time(at))
            connection.execute("INSERT INTO signals VALUES (?, ?, ?, ?, ?, ?, ?)", given)
        else:
            scored = ("p", f"r{number}", "main", "scored", value, _time(at))
            connection.execute("INSERT INTO rewards VALUES (?, ?, ?, ?, ?, ?)", scored)
    with mock.patch.object(comparison, "_compared", wraps=comparison._compared) as compared:
        found = gather(connection, "p", _PLAN, _BEGUN, until)
    return found, [(call.args[1], call.args[2]) for call in compared.call_args_list]


@given(
    runs=st.lists(_RUN, min_size=1, max_size=12),
    said=st.lists(_SAID, max_size=24, unique_by=lambda s: (s[0], s[1], s[2])),
    until=_TIME,
)
def test_what_is_said_later_changes_no_look_and_no_pair(
    connection: duckdb.DuckDBPyConnection, runs: list[tuple[int, int]], said: list[Said], until: int
) -> None:
    then = _look(connection, runs, [s for s in said if s[0] <= until], until)
    assert _look(connection, runs, said, until) == then
    _, later = _look(connection, runs, said, _END)
    for before, after in zip(then[1], later, strict=True):
        for side_before, side_after in zip(before, after, strict=True):
            assert side_after[: len(side_before)] == side_before


def test_a_run_counts_with_the_first_number_that_is_known_of_it(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    runs = [(2, 5), (2, 3), (1, 4)]
    said = [
        (9, 0, "solved", 0.25), (7, 1, "solved", 0.5), (11, 1, "solved", 1.0), (2, 2, "solved", 0.75),
        (6, 0, "stars", 0.125), (8, 0, "", 1.0), (3, 1, "", 0.0),
    ]  # fmt: skip
    _, (solved, reward, mixed) = _look(connection, runs, said, _END)
    assert solved == ([0.5, 0.25], [0.75])
    assert reward == ([0.05, 0.0], [0.1])
    assert mixed == ([0.0, 0.125], [])


def test_what_is_no_number_of_a_run_of_this_project_does_not_count(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    """Not a number that is none, what another project says of a run of that id, and a run without a call."""
    runs = [(2, 5), (2, 3), (1, 4)]
    _look(connection, runs, [(6, 0, "solved", float("nan")), (7, 2, "solved", 0.5)], _END)
    connection.execute(
        "INSERT INTO signals VALUES ('other', 'r1', 'number', -1, 'solved', 1.0, ?)", [_time(8)]
    )
    connection.execute("INSERT INTO rewards VALUES ('other', 'r1', 'main', 'scored', 1.0, ?)", [_time(8)])
    connection.execute("UPDATE trajectories SET exchanges = 0 WHERE trajectory = 'r2'")
    found = gather(connection, "p", _PLAN, _BEGUN, _END)
    assert [(f.candidate_runs, f.control_runs) for f in found.findings] == [(0, 0), (2, 0), (0, 0)]
