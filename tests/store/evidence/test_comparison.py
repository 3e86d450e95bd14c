"""What was seen at a look stays: the evidence of a time is a function of what was known then."""

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Config, ConfigError
from pipeline.events import PolicyPromoted
from pipeline.names import split_point
from rollout_gateway.serving.routing import _version_in_split
from store.evidence import comparison, decide
from store.evidence.comparison import Evidence, Guard, Metric, Plan, Share, _bounds, read_evidence
from tests.store.evidence.kit import TABLES

_RUN_COLUMNS = "project, model, trajectory, outcome, opened_at, completed_at, first_step, last_step, reward, exchanges"
DEADLINE = 20
"""Microseconds, as all times here."""
_PLAN = Plan(
    metric=Metric(sql="feedback['solved']"),
    guards=(Guard(sql="reward", worse="lower"), Guard(sql="coalesce(judged, feedback['stars'])")),
    deadline_s=DEADLINE / 1e6,
)
_SHARE = 50.0
_BEGUN = Evidence(plan=_PLAN, candidate="m@2", control="m@1", shares=(Share(percent=_SHARE),))
_END = 10**6

Run = tuple[int, int, int | None]  # version, times at which it was opened and at which it ended
Said = tuple[int, int, str, float]  # time, number of the run, name ("" for a judge's reward), value
_TIME = st.integers(1, 40)
_RUN = st.tuples(st.sampled_from((1, 2)), _TIME, st.none() | st.integers(0, 30)).map(
    lambda r: (r[0], r[1], None if r[2] is None else r[1] + r[2])
)
_SAID = st.tuples(_TIME, st.integers(0, 11), st.sampled_from(("solved", "stars", "other", "")), st.floats(0, 1))


def _time(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1e6, UTC)


def _id(number: int, step: int) -> str:
    """An id of a run that the split gives this version."""
    ids = (f"r{number}-{salt}" for salt in itertools.count())
    return next(id_ for id_ in ids if (split_point(id_) < _SHARE) == (step == 2))


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": "1"}) as found:
        found.execute(TABLES)
        yield found


def _fill(connection: duckdb.DuckDBPyConnection, runs: list[Run], said: list[Said], until: int = _END) -> list[str]:
    """Let these be all runs and all that was said of them until `until`. Return the ids of the runs."""
    ids = [_id(number, step) for number, (step, _, _) in enumerate(runs)]
    opened = [
        ("p", "m", ids[n], "ok", _time(began), _time(ended), step, step, n / 20, 1)
        if ended is not None and ended <= until
        else ("p", "m", ids[n], "open", _time(began), None, None, None, None, None)
        for n, (step, began, ended) in enumerate(runs)
        if began <= until
    ]
    said = [s for s in said if s[0] <= until and s[1] < len(ids)]
    given = [("p", ids[n], "number", -1, name, value, _time(at)) for at, n, name, value in said if name]
    scored = [("p", ids[n], "main", "scored", value, _time(at)) for at, n, name, value in said if not name]
    connection.begin()
    for table, rows in (("trajectories", opened), ("signals", given), ("rewards", scored)):
        connection.execute(f"DELETE FROM {table}")
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            columns = f"({_RUN_COLUMNS})" if table == "trajectories" else ""
            connection.executemany(f"INSERT INTO {table} {columns} VALUES ({marks})", rows)
    connection.commit()
    return ids


def _look(
    connection: duckdb.DuckDBPyConnection, until: int
) -> tuple[Evidence, list[tuple[list[comparison.Bounds], list[comparison.Bounds]]]]:
    """Return the evidence at `until`, and for each metric the bounds of the candidate's and of the control's runs."""
    seen: list[list[comparison.Bounds]] = []

    def bounds(*args: Any) -> list[comparison.Bounds]:
        seen.append(_bounds(*args))
        return seen[-1]

    with mock.patch.object(comparison, "_bounds", bounds):
        found = read_evidence(connection, "p", _BEGUN, until)
    return found, list(zip(seen[::2], seen[1::2], strict=True))


@settings(max_examples=60)
@given(
    runs=st.lists(_RUN, min_size=1, max_size=12),
    said=st.lists(_SAID, max_size=24, unique_by=lambda s: (s[0], s[1], s[2])),
    until=st.integers(1, 60),
)
def test_what_is_said_later_changes_no_look_and_no_pair(
    connection: duckdb.DuckDBPyConnection, runs: list[Run], said: list[Said], until: int
) -> None:
    _fill(connection, runs, said, until)
    then = _look(connection, until)
    _fill(connection, runs, said)
    assert _look(connection, until) == then
    _, later = _look(connection, _END)
    for before, after in zip(then[1], later, strict=True):
        for side_before, side_after in zip(before, after, strict=True):
            assert side_after[: len(side_before)] == side_before


def test_runs_count_in_the_order_of_opening_with_the_first_number_that_is_known(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    runs: list[Run] = [(2, 2, 5), (2, 1, 3), (1, 1, 4), (2, 3, None)]
    said = [
        (9, 0, "solved", 0.25),
        (7, 1, "solved", 0.5),
        (11, 1, "solved", 1.0),
        (2, 2, "solved", 0.75),
        (6, 0, "stars", 0.125),
        (8, 0, "", 1.0),
        (3, 1, "", 0.0),
    ]
    _fill(connection, runs, said)
    _, (solved, reward, mixed) = _look(connection, 20)
    assert solved == ([(0.5, 0.5), (0.25, 0.25)], [(0.75, 0.75)])
    assert reward == ([(0.05, 0.05), (0.0, 0.0)], [(0.1, 0.1)])
    assert mixed == ([(0.0, 0.0), (0.125, 0.125)], [])
    _, (solved, _, _) = _look(connection, 8)  # the second one is not known yet, though the first one waits for nothing
    assert solved == ([(0.5, 0.5)], [(0.75, 0.75)])
    _, (solved, _, mixed) = _look(connection, 3 + DEADLINE)
    assert solved[0][2] == (0, 1)
    assert mixed == ([(0.0, 0.0), (0.125, 0.125), (0, 1)], [(0, 1)])


def test_a_late_run_counts_against_what_would_be_decided(connection: duckdb.DuckDBPyConnection) -> None:
    """What came after the deadline is as if it had not come; or the plan gives such a run a value."""
    runs: list[Run] = [(2, 1, 5), (1, 1, 5), (2, 2, 3 + DEADLINE), (1, 2, None)]
    _fill(connection, runs, [(6, 0, "solved", 1.0), (2 + DEADLINE, 1, "solved", 1.0)])
    found, (solved, _, _) = _look(connection, _END)
    assert solved == ([(1, 1), (0, 1)], [(0, 1), (0, 1)])
    (finding, *_) = found.findings
    assert (finding.pairs, finding.candidate_late, finding.control_late) == (2, 1, 2)
    assert (finding.candidate_mean, finding.control_mean, finding.difference) == (0.75, 0.5, 0.25)
    plan = msgspec.structs.replace(_PLAN, metric=Metric(sql="feedback['solved']", late=0.25))
    (finding, *_) = read_evidence(connection, "p", msgspec.structs.replace(_BEGUN, plan=plan), _END).findings
    assert (finding.candidate_mean, finding.control_mean) == (0.625, 0.25)
    with pytest.raises(ConfigError, match="the value of late runs, 2, is not within the range"):
        Metric(sql="reward", late=2)


def test_a_run_has_the_side_of_its_id(connection: duckdb.DuckDBPyConnection) -> None:
    """Also if it made no call. One that another version answered does not count, nor one that was pinned."""
    ids = _fill(connection, [(2, n, 5) for n in range(1, 6)], [])
    connection.execute(
        "UPDATE trajectories SET exchanges = 0, first_step = 0, last_step = 0 WHERE trajectory = ?", [ids[0]]
    )
    connection.execute("UPDATE trajectories SET first_step = 1 WHERE trajectory = ?", [ids[1]])
    connection.execute("UPDATE trajectories SET first_step = 1, last_step = 1 WHERE trajectory = ?", [ids[2]])
    connection.execute("INSERT INTO rollout_opened VALUES ('p', ?, 'm@2', '')", [ids[3]])
    _, (_, reward, _) = _look(connection, _END)
    connection.execute("DELETE FROM rollout_opened")
    assert reward == ([(0, 0), (4 / 20, 4 / 20)], [])


def test_the_split_of_a_comparison_is_the_gateways() -> None:
    split = PolicyPromoted(project="p", model="m", action="split", version="m@2", other="m@1", percent=30.0)
    for number in range(200):
        side = "m@2" if split_point(f"run-{number}") < split.percent else "m@1"
        assert _version_in_split(split, f"run-{number}") == side


def test_what_is_no_number_of_a_run_of_this_project_does_not_count(connection: duckdb.DuckDBPyConnection) -> None:
    """Not a number that is none, and what another project says of a run of that id."""
    ids = _fill(connection, [(2, 1, 5), (2, 1, 3)], [(6, 0, "solved", float("nan"))])
    connection.execute("INSERT INTO signals VALUES ('other', ?, 'number', -1, 'solved', 1.0, ?)", [ids[1], _time(8)])
    connection.execute("INSERT INTO rewards VALUES ('other', ?, 'main', 'scored', 1.0, ?)", [ids[1], _time(8)])
    _, (solved, reward, mixed) = _look(connection, DEADLINE)
    assert [len(candidates) for candidates, _ in (solved, reward, mixed)] == [0, 2, 0]


@pytest.mark.parametrize(("high", "percent"), [(0.1, 25.0), (0.1, 75.0), (0.7, 10.0)])
def test_rounded_means_stay_within_the_range(high: float, percent: float) -> None:
    """The mean of three times 0.1 is 0.10000000000000002, which no range from 0 to 0.1 has."""
    part = comparison.Part(percent, [(False, high)] * 60, [(False, 0.0)] * 60)
    finding = comparison._compare_pairs(Metric(sql="reward", high=high), [part], 0.05)
    assert finding.pairs
    assert finding.high <= high


def test_a_decision_that_differs_is_shown_as_it_was_recorded_and_as_it_is_now(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(connection, [(2, 1, 5), (1, 1, 4)], [(6, 0, "solved", 1.0)])
    recorded = read_evidence(connection, "p", _BEGUN, _END)
    _fill(connection, [(1, 1, 4)], [])  # one of the runs was erased
    connection.execute(
        'CREATE TEMP TABLE policy_promoted (project TEXT, model TEXT, evidence TEXT, other TEXT, "at" INT)'
    )
    text = msgspec.json.encode(recorded).decode()
    connection.execute(
        "INSERT INTO policy_promoted VALUES ('p', 'm', ?, '', 1), ('p', 'm', ?, 'm@1', 0)",
        [text, msgspec.json.encode(_BEGUN).decode()],
    )
    monkeypatch.setattr(decide, "installation_settings", lambda *_, **__: Config(project="p"))
    monkeypatch.setattr(decide.sql, "connect", lambda _: connection)
    assert decide.main(["check"]) == 1
    begun = msgspec.json.decode(text, type=Evidence)
    now = msgspec.json.encode(read_evidence(connection, "p", begun, _END)).decode()
    assert f"DIFFERENT: recorded {text}, now {now}\n1 decisions, 1 different" in capsys.readouterr().out
    connection.execute("DROP TABLE policy_promoted")
