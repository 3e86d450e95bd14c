"""`journeywork replay` and `journeywork diff`."""

import json
from pathlib import Path

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, GroupScored, TrainingBatch, TrajectoryCompleted, Verdict, pack_seqs
from pipeline.log.broker import Broker
from store.commands import diff, replay
from store.reading import sql
from tests.store import kit


async def test_a_group_is_replayed_once_marked_and_with_its_trajectories_put_back(
    broker: Broker, nats_config: NatsConfig, running_store: kit.StoreProcess, tmp_path: Path
) -> None:
    events = kit.run_of_one_step()
    await kit.publish(broker, events)
    async with running_store():
        await kit.until_acked(broker)
        await broker.js.purge_stream("ROLLOUTS", seq=7)  # retention took all but the last exchange and end
        with sql.connect(tmp_path) as connection:
            chosen = replay.select_groups(connection, where="reward_mean > 0.4")
            assert [c.seq for c in chosen] == [1]
            first = await replay.replay(nats_config, connection, chosen, "again")
            second = await replay.replay(nats_config, connection, chosen, "again")
        await kit.until_acked(broker)
    assert (first["groups"], second["groups"], second["already"], second["republished"]) == (1, 0, 1, 0)
    (replayed,) = await broker.read(GroupScored, project="p", model="m", group="g0", judge="j", branch="again")
    group = replayed.event
    assert (group.branch, group.origin, group.offline, group.closed_by) == ("again", "main/1", True, "replay")
    then = next(e for e in events if isinstance(e, GroupScored))
    ends = {r.event.trajectory: r.seq for r in await broker.read(TrajectoryCompleted)}
    there = tuple(msgspec.structs.replace(m, completed_seq=ends[m.trajectory]) for m in then.members)
    unpaid = tuple(msgspec.structs.replace(v, cost_usd=0.0) for v in then.verdicts)
    assert (group.members, group.verdicts) == (there, unpaid)
    exchanges = [r.event for r in await broker.read(ExchangeRecorded, project="p", trajectory="t0")]
    assert exchanges == [e for e in events if isinstance(e, ExchangeRecorded)][:2]
    # What was put back is nobody's news: the store holds it once.
    assert kit.stored(tmp_path / "store", "rollout.exchange") == [2, 3, 6, 7]
    assert len(kit.stored(tmp_path / "store", "group.scored")) == 2


async def test_the_batch_of_a_replayed_group_names_only_what_is_replayed_with_it(
    broker: Broker, nats_config: NatsConfig, history: Path
) -> None:
    """The trainer of the branch would wait for the others until it discards those that came."""

    def of_batch(seq: int, name: str, model: str = "m") -> replay.StoredGroup:
        batch = TrainingBatch(id="b", groups=("a", "b", "c", "d"), settings=b'{"loss.type": "sft"}')
        return replay.StoredGroup(kit.scored(name, {}, batch=batch, model=model), seq)

    chosen = [of_batch(1, "a"), of_batch(2, "b"), of_batch(3, "c"), of_batch(4, "d", "other")]
    with sql.connect(history) as connection:
        for groups in (chosen[:2], chosen):
            await replay.replay(nats_config, connection, groups, "again")
    there = [r.event for r in await broker.read(GroupScored, branch="again")]
    named = {event.group: event.batch.groups for event in there if event.batch is not None}
    assert named == {"a": ("a", "b"), "b": ("a", "b"), "c": ("c",), "d": ("d",)}
    assert {event.batch.settings for event in there if event.batch} == {b'{"loss.type": "sft"}'}


def test_groups_are_selected_by_a_condition_over_their_view(history: Path) -> None:
    with sql.connect(history) as connection:
        assert len(replay.select_groups(connection, "project = 'p' AND decided_at > '2020-01-01'")) == 1
        assert replay.select_groups(connection, "size > 2") == replay.select_groups(connection, source="other") == []


def test_the_command_refuses_what_makes_no_sense(capfd: pytest.CaptureFixture[str], history: Path) -> None:
    assert replay.main(["--branch", "main"]) == 2
    assert replay.main(["--branch", "b", "--run-dir", str(history), "--where", "since = 1"]) == 2
    assert "since" in capfd.readouterr().err


def of_model(groups: dict[str, dict[str, float]]) -> diff.Rewards:
    return {("p", "m", group): rewards for group, rewards in groups.items()}


def test_what_differs_between_two_sets_of_rewards() -> None:
    a = {"g": {"x": 1.0, "y": 0.0, "z": 0.5}, "flat": {"x": 0.1, "y": 0.1}, "only": {"x": 1.0, "y": 0.0}}
    b = {"g": {"x": 0.0, "y": 1.0, "z": 0.5}, "flat": {"x": 0.1, "y": 0.9}, "other": {"x": 1.0}}
    got, _ = diff.compare(of_model(a), of_model(b))
    assert (got["groups"], got["trajectories"], got["only_in_a"], got["only_in_b"]) == (2, 5, 1, 1)
    assert (got["sign_flips"], got["rank_correlation"]) == (2, pytest.approx(-1.0))
    assert (got["no_variance_share_a"], got["no_variance_share_b"]) == (0.5, 0.0)


def test_eight_equal_rewards_have_no_variance_whatever_rounding_says() -> None:
    rewards = {str(i): 0.1 + i * 1e-12 for i in range(8)}
    got, _ = diff.compare(of_model({"g": rewards}), of_model({"g": dict(reversed(rewards.items()))}))
    assert (got["sign_flips"], got["no_variance_share_a"], got["rank_correlation"]) == (0, 1.0, None)


def test_groups_of_one_id_of_two_models_are_two_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The runs of either model turn; those of the two models together, one far above the other, would not."""

    for branch, low, high in (("main", 0.0, 1.0), ("b", 1.0, 0.0)):
        for model, base in (("a", 0.0), ("b", 10.0)):
            runs = {f"{model}-0": base + low, f"{model}-1": base + high}
            kit.fill(tmp_path, kit.scored("task-1", runs, model=model, branch=branch))
    kit.fill(tmp_path, kit.checkpoint(1, "a", groups=("task-1",), group_seqs=pack_seqs([1])))
    sides = ["--a", "branch=main", "--b", "branch=b", "--format", "json", "--run-dir", str(tmp_path)]
    assert diff.main(sides) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["groups"], said["sign_flips"]) == (2, 4)
    assert [(row["model"], row["group_id"], row["trajectories"]) for row in said["flipped"]] == [
        ("a", "task-1", ["a-0", "a-1"]),
        ("b", "task-1", ["b-0", "b-1"]),
    ]
    assert [(row["flipped"], row["trajectories"]) for row in said["checkpoints"]] == [(2, 2)]


def test_the_scores_of_a_model_are_the_means_of_its_passes_by_one_rubric(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def said_by(model: str, rubric: str, first: float, second: float) -> Verdict:
        by = {"judge_model": model, "rubric": rubric, "rubric_hash": f"hash-{rubric}"}
        return kit.verdict({"t0": first, "t1": second}, **by)

    passes = (said_by("x", "style", 1.0, 0.0), said_by("x", "style", 0.45, 0.55), said_by("y", "style", 0.9, 0.1))
    one = kit.scored("g0", {"t0": 1.0, "t1": 0.0}, verdicts=passes)
    kit.fill(tmp_path / "one", one)
    with sql.connect(tmp_path / "one") as connection:
        (means,) = diff.rewards(connection, {"judge_model": "x"}).values()
    assert means == pytest.approx({"t0": 0.725, "t1": 0.275})
    kit.fill(tmp_path, msgspec.structs.replace(one, verdicts=(*passes, said_by("x", "facts", 0.0, 1.0))))
    where = ["--b", "judge_model=y", "--format", "json", "--run-dir", str(tmp_path)]
    assert diff.main(["--a", "judge_model=x", *where]) == 2
    error = capfd.readouterr().err
    assert "g0 by several rubrics: add rubric=hash-facts (facts) or rubric=hash-style (style)" in error
    flips = []
    for rubric in ("style", "facts"):
        assert diff.main(["--a", f"judge_model=x,rubric=hash-{rubric}", *where]) == 0
        flips.append(json.loads(capfd.readouterr().out)["sign_flips"])
    assert flips == [0, 2]
    for wrong, told in (("rubric=hash-style", "add judge_model="), ("nonsense", "judge_model")):
        assert diff.main(["--a", wrong, *where]) == 2
        assert told in capfd.readouterr().err
