"""`journeywork replay` and `journeywork diff`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import (
    ExchangeRecorded,
    GroupScored,
    Score,
    TrajectoryCompleted,
    Verdict,
    wire_name,
)
from pipeline.log.broker import Broker
from store.commands import diff, replay
from store.reading import sql
from tests.store.kit import StoreProcess, fill, publish, run_of_one_step, stored, until_acked

pytestmark = pytest.mark.anyio


async def test_a_group_is_replayed_once_marked_and_with_its_trajectories_put_back(
    broker: Broker, nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path
) -> None:
    events = run_of_one_step()
    await publish(broker, events)
    async with running_store():
        await until_acked(broker)
        await broker.js.purge_stream("ROLLOUTS", seq=7)  # retention took all but the last exchange and end
        with sql.connect(tmp_path) as connection:
            chosen = replay.select_groups(connection, where="reward_mean > 0.4")
            assert [c.seq for c in chosen] == [1]
            first = await replay.replay(nats_config, connection, chosen, "again")
            second = await replay.replay(nats_config, connection, chosen, "again")
        await until_acked(broker)
    assert (first["groups"], second["groups"], second["already"], second["republished"]) == (1, 0, 1, 0)
    (replayed,) = await broker.read(
        GroupScored, project="p", model="m", group="g0", judge="j", branch="again"
    )
    group = replayed.event
    assert isinstance(group, GroupScored)
    assert (group.branch, group.origin, group.offline, group.closed_by) == (
        "again",
        "main/1",
        True,
        "replay",
    )
    then = next(e for e in events if isinstance(e, GroupScored))
    ends = {
        r.event.trajectory: r.seq
        for r in await broker.read(TrajectoryCompleted)
        if isinstance(r.event, TrajectoryCompleted)
    }
    there = tuple(msgspec.structs.replace(m, completed_seq=ends[m.trajectory]) for m in then.members)
    assert (group.members, group.verdicts) == (there, then.verdicts)
    exchanges = [r.event for r in await broker.read(ExchangeRecorded, project="p", trajectory="t0")]
    assert exchanges == [e for e in events if wire_name(e) == "rollout.exchange"][:2]
    assert isinstance(
        (await broker.read(TrajectoryCompleted, project="p", model="m", trajectory="t0"))[0].event,
        TrajectoryCompleted,
    )
    # What was put back is nobody's news: the store holds it once.
    assert stored(tmp_path / "store", "rollout.exchange") == [2, 3, 6, 7]
    assert len(stored(tmp_path / "store", "group.scored")) == 2


def test_groups_are_selected_by_a_condition_over_their_view(tmp_path: Path) -> None:
    fill(tmp_path, run_of_one_step())
    with sql.connect(tmp_path) as connection:
        assert (
            len(replay.select_groups(connection, "project = 'p' AND decided_at > '2020-01-01'", limit=3)) == 1
        )
        assert replay.select_groups(connection, "size > 2") == []
        assert replay.select_groups(connection, source="other") == []


def test_the_command_refuses_what_makes_no_sense(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert replay.main(["--branch", "main"]) == 2
    fill(tmp_path, run_of_one_step())
    assert replay.main(["--branch", "b", "--run-dir", str(tmp_path), "--where", "since = 1"]) == 1
    assert "since" in capfd.readouterr().err
    assert replay.main(["--branch", "b", "--run-dir", str(tmp_path), "--dry-run"]) == 0
    assert json.loads(capfd.readouterr().out) == {"groups": 1, "ids": ["g0"]}


def test_what_differs_between_two_sets_of_rewards() -> None:
    a = {"g": {"x": 1.0, "y": 0.0, "z": 0.5}, "flat": {"x": 0.1, "y": 0.1}, "only": {"x": 1.0, "y": 0.0}}
    b = {"g": {"x": 0.0, "y": 1.0, "z": 0.5}, "flat": {"x": 0.1, "y": 0.9}, "other": {"x": 1.0}}
    got = diff.compare(a, b)
    assert (got["groups"], got["trajectories"], got["only_in_a"], got["only_in_b"]) == (2, 5, 1, 1)
    assert (got["sign_flips"], got["rank_correlation"]) == (2, pytest.approx(-1.0))
    assert (got["no_variance_share_a"], got["no_variance_share_b"], got["signal_gained"]) == (0.5, 0.0, 1)


def test_equal_sets_differ_in_nothing() -> None:
    a = {"g": {"x": 0.3, "y": 0.1, "z": 0.2}}
    got = diff.compare(a, {"g": {t: r + 1e-9 for t, r in a["g"].items()}})
    assert (got["sign_flips"], got["rank_correlation"]) == (0, pytest.approx(1.0))


def test_eight_equal_rewards_have_no_variance_whatever_rounding_says() -> None:
    rewards = {str(i): 0.1 + i * 1e-12 for i in range(8)}
    got = diff.compare({"g": rewards}, {"g": dict(reversed(rewards.items()))})
    assert (got["sign_flips"], got["no_variance_share_a"], got["rank_correlation"]) == (0, 1.0, None)


def test_a_side_is_a_filter() -> None:
    assert diff.parse_side("branch=main,judge=x") == {"branch": "main", "judge": "x"}
    with pytest.raises(Exception, match="judge_model"):
        diff.parse_side("nonsense")


def test_the_diff_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = run_of_one_step()
    scored = next(e for e in events if isinstance(e, GroupScored))
    swapped = tuple(msgspec.structs.replace(m, reward=1 - m.reward) for m in scored.members)
    fill(tmp_path, [*events, msgspec.structs.replace(scored, branch="b", members=swapped)])
    where = ["--run-dir", str(tmp_path)]
    assert diff.main(["--a", "branch=main", "--b", "branch=b", "--format", "json", *where]) == 0
    assert json.loads(capfd.readouterr().out)["sign_flips"] == 2
    assert diff.main(["--a", "branch=main", "--b", "branch=none", *where]) == 1
    assert diff.main(["--a", "branch=main,judge_model=judge/1", "--b", "branch=main", *where]) == 0
    assert "rank_correlation" in capfd.readouterr().out


def test_the_rewards_of_calls_can_be_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scored = next(e for e in run_of_one_step() if isinstance(e, GroupScored))

    def judged(branch: str, *rewards: float) -> GroupScored:
        calls = {str(call): reward for call, reward in enumerate(rewards)}
        member = msgspec.structs.replace(scored.members[0], call_rewards=calls)
        vote = Score(
            trajectory="t0", score=rewards[0], call=0, explanation="the user objected", hint="look first"
        )
        verdict = Verdict(judge_model="judge/1", rubric="next_state", scores=(vote,))
        return msgspec.structs.replace(scored, branch=branch, members=(member,), verdicts=(verdict,))

    fill(tmp_path, [judged("a", 1.0, -1.0, 0.0), judged("b", -1.0, 1.0, 0.0)])
    where = ["--calls", "--run-dir", str(tmp_path), "--format", "json"]
    assert diff.main(["--a", "branch=a", "--b", "branch=b", *where]) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["trajectories"], said["sign_flips"], said["rank_correlation"]) == (3, 2, pytest.approx(-1.0))
    assert diff.main(["--a", "branch=a", "--b", "branch=b", *where[1:]]) == 1
    assert diff.main(["--a", "judge_model=judge/1", "--b", "branch=b", *where]) == 2
    with sql.connect(tmp_path) as connection:
        asked = "SELECT \"call\", score, explanation, hint, position FROM verdicts WHERE branch = 'a'"
        assert connection.execute(asked).fetchall() == [(0, 1.0, "the user objected", "look first", None)]
