"""What was seen at a look stays: the evidence of a time is a function of what was known then."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from unittest import mock

import duckdb
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Config, ConfigError
from store.evidence import comparison, decide
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
    with duckdb.connect(config={"threads": "1"}) as found:
        found.execute(_TABLES)
        yield found


def _fill(connection: duckdb.DuckDBPyConnection, runs: list[tuple[int, int]], said: list[Said]) -> None:
    """Let these be all runs, and all that was said of them."""
    ended = [
        ("p", "m", f"r{n}", "ok", _time(1), _time(at), step, step, n / 20, 1)
        for n, (step, at) in enumerate(runs)
    ]
    given = [("p", f"r{n}", "number", -1, name, value, _time(at)) for at, n, name, value in said if name]
    scored = [("p", f"r{n}", "main", "scored", value, _time(at)) for at, n, name, value in said if not name]
    connection.begin()
    for table, rows in (("trajectories", ended), ("signals", given), ("rewards", scored)):
        connection.execute(f"DELETE FROM {table}")
        if rows:
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    connection.commit()


def _look(
    connection: duckdb.DuckDBPyConnection, until: int
) -> tuple[Evidence, list[tuple[list[float], list[float]]]]:
    """Return the evidence at `until`, and for each metric the candidate's and the control's numbers in their order."""
    with mock.patch.object(comparison, "_compared", wraps=comparison._compared) as compared:
        found = gather(connection, "p", _BEGUN, until)
    return found, [(call.args[1], call.args[2]) for call in compared.call_args_list]


@settings(max_examples=40)
@given(
    runs=st.lists(_RUN, min_size=1, max_size=12),
    said=st.lists(_SAID, max_size=24, unique_by=lambda s: (s[0], s[1], s[2])),
    until=_TIME,
)
def test_what_is_said_later_changes_no_look_and_no_pair(
    connection: duckdb.DuckDBPyConnection, runs: list[tuple[int, int]], said: list[Said], until: int
) -> None:
    _fill(connection, runs, [s for s in said if s[0] <= until])
    then = _look(connection, until)
    _fill(connection, runs, said)
    assert _look(connection, until) == then
    _, later = _look(connection, _END)
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
    _fill(connection, runs, said)
    _, (solved, reward, mixed) = _look(connection, _END)
    assert solved == ([0.5, 0.25], [0.75])
    assert reward == ([0.05, 0.0], [0.1])
    assert mixed == ([0.0, 0.125], [])


def test_what_is_no_number_of_a_run_of_this_project_does_not_count(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    """Not a number that is none, what another project says of a run of that id, and a run without a call."""
    runs = [(2, 5), (2, 3), (1, 4)]
    _fill(connection, runs, [(6, 0, "solved", float("nan")), (7, 2, "solved", 0.5)])
    connection.execute(
        "INSERT INTO signals VALUES ('other', 'r1', 'number', -1, 'solved', 1.0, ?)", [_time(8)]
    )
    connection.execute("INSERT INTO rewards VALUES ('other', 'r1', 'main', 'scored', 1.0, ?)", [_time(8)])
    connection.execute("UPDATE trajectories SET exchanges = 0 WHERE trajectory = 'r2'")
    found = gather(connection, "p", _BEGUN, _END)
    assert [(f.candidate_runs, f.control_runs) for f in found.findings] == [(0, 0), (2, 0), (0, 0)]


@pytest.mark.parametrize(
    "sql", ["reward) AS DOUBLE), 0) UNION SELECT nullif(CAST((1", "1) AS DOUBLE), 0); SELECT ((("]
)
def test_a_metric_that_makes_another_statement_is_refused(
    connection: duckdb.DuckDBPyConnection, sql: str
) -> None:
    _fill(connection, [], [])
    with pytest.raises(ConfigError, match="each is one expression over a run"):
        gather(connection, "p", msgspec.structs.replace(_BEGUN, plan=Plan(metric=Metric(sql=sql))), _END)


def test_a_decision_that_differs_is_shown_as_it_was_recorded_and_as_it_is_now(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(connection, [(2, 5), (1, 4)], [(6, 0, "solved", 1.0)])
    recorded = gather(connection, "p", _BEGUN, _END)
    _fill(connection, [(1, 4)], [])  # one of the runs was erased
    connection.execute(
        'CREATE TEMP TABLE policy_promoted (project TEXT, model TEXT, evidence TEXT, other TEXT, "at" INT)'
    )
    text = msgspec.json.encode(recorded).decode()
    connection.execute(
        "INSERT INTO policy_promoted VALUES ('p', 'm', ?, '', 1), ('p', 'm', '{}', 'm@1', 0)", [text]
    )
    monkeypatch.setattr(decide, "run_settings", lambda *_, **__: Config(project="p"))
    monkeypatch.setattr(decide.sql, "connect", lambda _: connection)
    assert decide.main(["check"]) == 1
    begun = msgspec.json.decode(text, type=Evidence)
    now = msgspec.json.encode(gather(connection, "p", begun, _END)).decode()
    assert f"DIFFERENT: recorded {text}, now {now}\n1 decisions, 1 different" in capsys.readouterr().out
    connection.execute("DROP TABLE policy_promoted")
