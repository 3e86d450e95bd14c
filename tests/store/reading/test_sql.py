"""The documented views, over a store written from a real log."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.events import CheckpointPublished, Event, GroupScored, pack_seqs, schema
from store.reading import sql
from store.reading.views import VIEWS
from tests.store.kit import checkpoint, completed, discarded, exchange, fill, opened, run_of_one_step, scored, verdict


def rows(run_dir: Path, query: str) -> list[Any]:
    with sql.connect(run_dir) as connection:
        return connection.sql(query).fetchall()


def test_each_view_has_its_documented_columns_of_the_same_types_in_an_empty_store_and_a_full_one(
    tmp_path: Path,
) -> None:
    history = tmp_path / "full"
    fill(history, *run_of_one_step(), opened("t9", group="g9", asked="master"))
    (tmp_path / "store").mkdir()
    with sql.connect(history) as full, sql.connect(tmp_path) as empty:
        for view in VIEWS:
            for connection, filled in ((full, True), (empty, False)):
                result = connection.sql(f"FROM {view.name}")
                assert set(view.meanings) <= set(view.columns(connection)) == set(result.columns), view.name
                # Of this history no run waits.
                assert bool(result.fetchall()) == (filled and view.name not in ("waiting", "utilization")), view.name
                assert [str(t) for t in result.types].count('"NULL"') == 0, view.name
        for name in [v.name for v in VIEWS] + [sql.table_name(t) for t in schema.tables()]:
            assert full.sql(f"FROM {name}").types == empty.sql(f"FROM {name}").types, name


def test_lineage_goes_from_checkpoint_to_tokens_and_verdicts(history: Path) -> None:
    got = rows(
        history, "SELECT trajectory, seq, reward, verdicts[1].score, staleness, exchange_seq FROM lineage ORDER BY 1, 2"
    )
    assert got == [
        ("t0", 0, 1.0, 0.9, 0, 2),
        ("t0", 1, 1.0, 0.9, 0, 3),
        ("t1", 0, 0.0, 0.1, 0, 6),
        ("t1", 1, 0.0, 0.1, 0, 7),
    ]


def test_lineage_names_the_data_set_that_a_checkpoint_was_trained_on(tmp_path: Path) -> None:
    """Such a checkpoint has no groups, and had no row."""
    fill(tmp_path, *run_of_one_step(), checkpoint(2, source="sft:sha256:ab"))
    got = rows(tmp_path, "SELECT version, parent, source, count(seq) FROM lineage GROUP BY ALL ORDER BY 1")
    assert got == [("m@1", "m@0", None, 4), ("m@2", "m@1", "sft:sha256:ab", 0)]


def test_an_open_trajectory_and_one_known_only_by_its_end_are_both_there(tmp_path: Path) -> None:
    fill(tmp_path, opened("t0"), completed("t1"))
    got = rows(tmp_path, "SELECT trajectory, outcome FROM trajectories ORDER BY 1")
    assert got == [("t0", "open"), ("t1", "scored")]


def test_a_member_without_a_score_has_no_reward(tmp_path: Path) -> None:
    group = scored("g", {"a": 1.0, "b": 0.0, "c": 0.0})
    first, second, third = group.members
    lost = msgspec.structs.replace(second, outcome="no_result")
    fill(tmp_path, msgspec.structs.replace(group, members=(first, lost, third)))
    got = rows(tmp_path, "SELECT trajectory, reward, centered FROM rewards ORDER BY ALL")
    assert got == [("a", 1.0, 0.5), ("b", None, None), ("c", 0.0, -0.5)]


def test_views_say_what_happened(history: Path) -> None:
    expected: dict[str, list[Any]] = {
        "role, content, is_reply FROM messages WHERE trajectory = 't0' AND seq = 1 ORDER BY position": [
            ("system", "play", False),
            ("user", "go 1", False),
            ("assistant", "x", True),
        ],
        "reason, duration_s, duration FROM starvation": [("stale", 4.0, "<10s")] * 2,
        "judge_model, cost_usd, verdicts FROM judge_cost": [("judge/1", 0.25, 1)],
        "version, replica, delay_s < 5 FROM adapters": [("m@1", "r0", True)],
        "groups, trajectories, reward_mean FROM steps": [(1, 2, 0.5)],
        "trajectory, centered FROM rewards ORDER BY 1": [("t0", 0.5), ("t1", -0.5)],
        "trajectory, position, left_out FROM verdicts ORDER BY 1": [("t0", 1, 0), ("t1", 0, 0)],
        "DISTINCT trace_id FROM exchanges": [("ab" * 16,)],
        "stream, stream_seq, payload FROM dead": [("ROLLOUTS", 7, b"\xc1")],
    }
    with sql.connect(history) as connection:
        assert {asked: connection.sql(f"SELECT {asked}").fetchall() for asked in expected} == expected


def test_a_step_s_mean_over_all_groups_counts_those_that_taught_nothing(tmp_path: Path) -> None:
    """Groups are scored at 1 s, 2 s, …; those of the second and fourth train."""

    def judged(at: int, rewards: tuple[float, ...], split: str = "train") -> GroupScored:
        runs = {f"{split}{at}-{i}": reward for i, reward in enumerate(rewards)}
        return scored(f"g{at}", runs, {"split": split}, split=split, at=at * 1_000_000)

    def step(number: int, trained: int) -> CheckpointPublished:
        return checkpoint(number, groups=(f"g{trained}",), at=trained * 1_000_001)

    rewards = ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.0, 0.0))
    groups = [judged(at, pair) for at, pair in enumerate(rewards, 1)]
    fill(tmp_path, *groups, judged(3, (0.0,), "val"), step(1, 2), step(2, 4), step(3, 9))
    asked = "SELECT step, reward_mean, reward_mean_all FROM steps ORDER BY step"
    assert rows(tmp_path, asked) == [(1, 0.5, 0.75), (2, 0.75, 0.875), (3, None, None)]
    asked = "SELECT split, count(*), avg((NOT has_signal)::INT) FROM groups GROUP BY 1 ORDER BY 1"
    assert rows(tmp_path, asked) == [("train", 5, 0.6), ("val", 1, None)]  # validation never trains


def test_a_group_is_one_row_also_if_it_was_discarded_after_its_scoring(tmp_path: Path) -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0}
    fill(
        tmp_path,
        scored("trained", rewards),
        scored("old", rewards),
        discarded("trained", "late", "d"),
        discarded("old", "stale", "a", "b", "c"),
        discarded("old", "late", "d"),
        discarded("alone", "too_small", "e"),
        discarded("alone", "late", "f"),
    )
    asked = "SELECT group_id, status, size, discarded, reason, reward_max FROM groups ORDER BY 1"
    assert rows(tmp_path, asked) == [
        ("alone", "discarded", 0, 2, "too_small", None),
        ("old", "scored", 3, 4, "stale", 1.0),
        ("trained", "scored", 3, 1, "late", 1.0),
    ]


def test_lineage_of_a_run_that_was_played_again_after_the_log_lost_its_tail(tmp_path: Path) -> None:
    """The lake has the calls of both; the checkpoint learned from the first, and a later one from the second."""
    events: list[Event] = []
    for step, calls in ((1, 2), (4, 3)):
        steps = {"exchanges": calls, "first_step": step - 1, "last_step": step - 1}
        events += [exchange("t", seq, step - 1) for seq in range(calls)]
        events.append(scored(f"g{step}", {"t": 1.0}, steps))
        seq = 1 if step == 1 else 2
        events.append(checkpoint(step, groups=(f"g{step}",), group_seqs=pack_seqs([seq])))
    fill(tmp_path, *events)
    asked = "SELECT step, policy_version, count(*) FROM lineage GROUP BY ALL ORDER BY 1"
    assert rows(tmp_path, asked) == [(1, "m@0", 2), (4, "m@3", 3)]


def test_group_sequences_tell_a_group_that_was_scored_twice_apart(tmp_path: Path) -> None:
    fill(tmp_path, *run_of_one_step(), scored("g0", {"t0": 1.0}, judge="other"))
    assert rows(tmp_path, "SELECT DISTINCT judge FROM lineage") == [("j",)]


def test_the_command_answers_and_says_what_is_wrong(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert sql.main(["--run-dir", str(history), "--format", "json", "SELECT count(*) AS n FROM groups"]) == 0
    assert capfd.readouterr().out == '[{"n":2}]\n'
    for folder, query, why in (
        (history, "FROM nowhere", "nowhere"),
        (history, "FROM nowhere", "SHOW TABLES"),
        (history / "none", "SELECT 1", "is no installation"),
        (history, "", "the query is empty"),
        (history, "-- nothing", "the query is empty"),
    ):
        assert sql.main(["--run-dir", str(folder), query]) == 2
        assert why in capfd.readouterr().err


@pytest.mark.parametrize("form", ["table", "json"])
def test_agents_text_acts_on_no_terminal(form: str, history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    query = "SELECT chr(27) || '[2J' || chr(155) || chr(8238) || 'é' AS text"
    assert sql.main(["--run-dir", str(history), "--format", form, query]) == 0
    shown = capfd.readouterr().out
    assert not set("\x1b\x9b\u202e") & set(shown)
    assert "é" in shown


def test_a_file_that_is_damaged_before_its_footer_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """DuckDB says "Out of buffer", or something like it."""
    lake = fill(tmp_path, *(exchange(f"t{n}") for n in range(200)))
    (name,) = lake.names("rollout.exchange")
    path = Path(lake.storage.key("rollout.exchange", name))
    content = path.read_bytes()
    middle = len(content) // 3
    path.write_bytes(content[:4] + b"\xff" * (middle - 4) + content[middle:])
    assert sql.main(["--run-dir", str(tmp_path), "FROM exchanges"]) == 1
    assert f"{name} is damaged" in capfd.readouterr().err


def test_a_query_finds_the_rows_of_all_that_it_names(history: Path) -> None:
    """Only these tables are opened for it."""
    with sql.connect(history) as whole:
        names = [v.name for v in VIEWS] + [sql.table_name(t) for t in schema.tables()]
        for query in (*(f"SELECT count(*) FROM {name}" for name in names), "FROM query('FROM groups')"):
            with sql.connect(history, query) as connection:
                assert connection.sql(query).fetchall() == whole.sql(query).fetchall(), query


def test_each_step_has_what_was_spent_since_the_one_before_and_its_gain(tmp_path: Path) -> None:
    def judged(group: str, at: int, usd: float) -> GroupScored:
        return scored(group, {}, verdicts=(verdict(cost_usd=usd),), at=at)

    def held(step: int, reward: float) -> GroupScored:
        member = {"split": "val", "first_step": step, "last_step": step}
        return scored(f"v{step}", {f"v{step}": reward}, member, split="val", at=1_000_000)

    def call(seq: int, begin: int, end: int, replica: str = "r0", **more: Any) -> Event:
        return exchange("t", seq, started_at=begin * 1_000_000, at=end * 1_000_000, replica=replica, **more)

    calls = [
        call(0, 1, 3),
        call(1, 2, 5),  # two seconds of it are beyond the call before
        call(2, 3, 4),  # none is
        call(3, 1, 4, "r1"),
        call(4, 1, 40, "r1", copied_from="x/0"),
        call(5, 20, 21),
        call(6, 50, 52),
    ]
    fill(
        tmp_path,
        *calls,
        *(judged(f"g{i}", at * 1_000_000, usd) for i, (at, usd) in enumerate(((5, 1.0), (9, 0.5), (20, 2.0)))),
        *(held(step, reward) for step, reward in ((0, 0.25), (1, 0.5), (2, 1.0))),
        checkpoint(1, metrics={"step_s": 4.0, "gpu_s": 8.0}, at=10_000_000),
        checkpoint(2, metrics={"step_s": 3.0}, at=30_000_000),
        completed("t", sampled_tokens=7, at=9_000_000),
    )
    found = rows(
        tmp_path,
        "SELECT version, judge_usd, train_gpu_s, serve_gpu_s, sampled_tokens, total_usd, total_gpu_s, total_tokens, "
        "held_out, gain FROM spending ORDER BY step",
    )
    assert found == [
        ("m@1", 1.5, 8.0, 7.0, 7, 1.5, 15.0, 7, 0.5, 0.25),
        ("m@2", 2.0, 3.0, 1.0, 0, 3.5, 19.0, 7, 1.0, 0.75),
        (None, 0.0, 0.0, 2.0, 0, 3.5, 21.0, 7, None, None),
    ]
