"""Which groups the service trains, discards, or moves to the dead letters."""

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pipeline.config import ModelConfig, OutsideConfig
from pipeline.events import TrainingBatch
from pipeline.log.broker import Broker
from tests.kits.waiting import until
from tests.trainer import kit
from tests.trainer.kit import all_acked, checkpoints, dead_letters, discards, reach, running, steps_reach, unacked
from trainer import service
from trainer.batches.groups import DiscardedGroup
from trainer.checkpoints import checkpoint
from trainer.sequences import build


async def test_groups_become_a_checkpoint(settings: kit.Settings) -> None:
    config = settings()
    async with Broker.connect(config.nats) as broker, running(config) as facts:
        assert facts == {"step": 0}
        for i in range(2):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0, 1.0], seed=i)
        (event,) = await steps_reach(broker, 1)
        await all_acked(broker)
        assert (event.version, event.parent, event.groups) == ("tiny@1", "tiny@0", ("g0", "g1"))
        tar = await broker.get_object("ADAPTERS", event.adapter)
        assert set(checkpoint.unpack(tar)) == set(checkpoint.ADAPTER_FILES)
        assert event.metrics["reward_mean"] == pytest.approx(2 / 3)
        assert event.metrics["tokens"] == 2 * 3 * 6
        manifest, _ = checkpoint.Checkpoints.of(config, kit.MODEL).read(1)
        assert manifest.event.batch_id == event.batch_id


async def test_groups_that_can_t_train_are_discarded_with_their_reason(training: kit.Training) -> None:
    async with training() as broker:
        await kit.publish_group(broker, "equal", [0.1] * 8)
        await kit.publish_group(broker, "single", [0.3])
        await broker.publish(kit.group("gone", [0.0, 1.0]))
        await kit.publish_group(broker, "good", [0.0, 1.0], seed=3)
        reasons = {d.group: d.reason for d in await reach(3, discards, broker)}
        assert reasons == {"equal": "no_variance", "single": "too_small", "gone": "history_gone"}
        assert await checkpoints(broker) == []

        async def one_left() -> bool:
            return await unacked(broker) == 1

        await until(one_left)  # `good` waits for a second group


async def test_validation_groups_are_scored_and_never_trained(
    settings: kit.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    original = checkpoint.Checkpoints.set_best

    def noting(self: checkpoint.Checkpoints, best: checkpoint.Best) -> None:
        threads.append(threading.current_thread())
        original(self, best)

    monkeypatch.setattr(checkpoint.Checkpoints, "set_best", noting)
    config = settings(groups_per_step=1, keep_checkpoints=1, max_staleness=9, best_min_trajectories=2)
    async with Broker.connect(config.nats) as broker, running(config):
        await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
        await steps_reach(broker, 1)
        for step, reward in ((0, 0.1), (1, 0.8)):
            await broker.publish(kit.group(f"val{step}", [reward] * 2, step=step, split="val"))
        await kit.publish_group(broker, "flat", [1.0, 1.0], seed=3, step=1)
        await kit.publish_group(broker, "g1", [0.0, 1.0], seed=2, step=1)
        events = await steps_reach(broker, 2)
        assert [e.groups for e in events] == [("g0",), ("g1",)]
        assert {(d.group, d.reason, d.split) for d in await discards(broker)} == {
            ("val0", "validation", "val"),
            ("val1", "validation", "val"),
            ("flat", "no_variance", "train"),
        }
        assert [e.metrics["run/turns"] for e in events] == [0.5, 0.5]
        # A group that was won as a whole teaches nothing, and is part of how well the policy does.
        assert [(e.metrics["reward_mean"], e.metrics["reward_mean_all"]) for e in events] == [(0.5, 0.5), (0.5, 0.75)]
        assert (events[1].metrics["val_step"], events[1].metrics["val_reward_mean"]) == (1, pytest.approx(0.8))
        best = checkpoint.Checkpoints.of(config, kit.MODEL).best()
        assert best is not None
        assert (best.step, best.rewards.mean, best.rewards.count) == (1, pytest.approx(0.8), 2)
    assert threads
    assert threading.main_thread() not in threads  # an fsync on the event loop holds up every heartbeat


async def test_two_models_share_a_process_and_take_turns(
    settings: kit.Settings, broker: Broker, tiny_base: str
) -> None:
    config = settings(groups_per_step=1)
    other = ModelConfig(name="other", base=tiny_base)
    config = msgspec.structs.replace(config, models=(*config.models, other))
    for i in range(4):
        await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
    for i in range(2):
        scored = kit.group(f"o{i}", [0.0, 1.0], model="other")
        for m, member in enumerate(scored.members):
            for event in kit.turns(member.trajectory, 70 + 10 * i + m):
                await broker.publish(event)
        await broker.publish(scored)
    async with running(config):
        events = await steps_reach(broker, 5)
    # A flood of one model's groups does not hold the other back.
    assert [e.version for e in events[:4]] == ["tiny@1", "other@1", "tiny@2", "other@2"]
    assert events[0].adapter_sha256 != events[1].adapter_sha256


@pytest.mark.parametrize(
    ("publish_bad", "said"),
    [
        (partial(kit.publish_group, name="bad", rewards=[0.0, 1e100]), "untrainable"),
        (partial(kit.publish_calls, name="bad", sampled=[7, kit.VOCAB]), "vocabulary"),
    ],
    ids=["rewards beyond float32", "tokens of another model"],
)
async def test_only_the_group_that_can_not_be_trained_goes_to_the_dead_letters(
    training: kit.Training, publish_bad: Callable[[Broker], Awaitable[object]], said: str
) -> None:
    async with training(groups_per_step=1, **{"loss.advantage_scaling": "none"}) as broker:
        await publish_bad(broker)
        await kit.publish_group(broker, "good", [0.0, 1.0], seed=2)
        (event,) = await steps_reach(broker, 1)
        await all_acked(broker)
        assert event.groups == ("good",)
        (dead,) = await dead_letters(broker)
        assert dead.consumer == "trainer"
        assert said in f"{dead.reason}: {dead.detail}"


@pytest.mark.parametrize("setting", ["optimizer.learning_rate", "lora.rank"])
async def test_a_batch_of_several_groups_whose_settings_can_not_be_used_goes_to_the_dead_letters(
    training: kit.Training, setting: str
) -> None:
    """The first is out of bounds; the second is permitted, but the model was loaded with another one."""
    value = {"optimizer.learning_rate": 1e9, "lora.rank": 2}[setting]
    batch = TrainingBatch(id="b", groups=("one", "two"), settings=msgspec.json.encode({setting: value}))
    async with training(groups_per_step=1, batch_settings=("optimizer", "lora")) as broker:
        for seed, name in enumerate(batch.groups):
            await kit.publish_group(broker, name, [0.0, 1.0], seed=seed, batch=batch)
        await kit.publish_group(broker, "good", [0.0, 1.0], seed=2)
        (event,) = await steps_reach(broker, 1)
        await all_acked(broker)
        assert event.groups == ("good",)
        letters = await dead_letters(broker)
        assert [letter.consumer for letter in letters] == ["trainer", "trainer"]
        assert all(setting in letter.detail for letter in letters), letters


async def test_a_group_sampled_under_a_penalty_is_discarded_and_says_so(training: kit.Training) -> None:
    async with training(groups_per_step=1) as broker:
        await kit.publish_calls(broker, "bent", [7, 8, 9], request=b'{"frequency_penalty": 0.5}')
        (event,) = await until(partial(discards, broker))
        assert (event.group, event.reason) == ("bent", "no_tokens")
        assert event.detail == "no member has a token to train: 6 tokens were sampled under frequency_penalty"


async def test_a_model_may_have_settings_of_its_own(settings: kit.Settings, tiny_base: str) -> None:
    config = settings(groups_per_step=2)
    own = {"groups_per_step": 1, "loss": {"type": "grpo"}, "max_steps": 1}
    config = msgspec.structs.replace(config, models=(ModelConfig(name="tiny", base=tiny_base, trainer=own),))
    async with Broker.connect(config.nats) as broker, running(config):
        for i in range(2):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
        await steps_reach(broker, 1)
        manifest, _ = checkpoint.Checkpoints.of(config, "tiny").read(1)
        assert manifest.event.groups == ("g0",)
        assert manifest.config["loss"]["type"] == "grpo"


async def test_groups_of_outside_models_are_discarded_by_name(settings: kit.Settings) -> None:
    """No trainer waits for them, and none is a dead letter."""
    config = settings()
    config = msgspec.structs.replace(config, outside=(OutsideConfig(name="master", url="http://x/v1"),))
    async with Broker.connect(config.nats) as broker, running(config):
        await broker.publish(kit.group("g", [0.0, 1.0], model="master"))
        await all_acked(broker)
        (discard,) = await discards(broker)
        assert (discard.model, discard.reason, discard.trajectories) == ("master", "outside_model", ("g-0", "g-1"))
        assert "no token of these runs is a policy's" in discard.detail
        assert await dead_letters(broker) == []


@pytest.mark.usefixtures("quick_redelivery")
async def test_groups_of_another_model_or_project_become_dead_letters(training: kit.Training) -> None:
    """A trainer that starts under another name meets the groups that wait for the former one."""
    async with training(groups_per_step=1) as broker:
        await broker.publish(kit.group("g", [0.0, 1.0], model="former"))
        await broker.publish(kit.group("g", [0.0, 1.0], project="former"))
        await broker.publish(kit.group("g", [0.0, 1.0], branch="replay-1"))
        await all_acked(broker)
        letters = await dead_letters(broker)
        assert [(d.reason, d.original_subject) for d in letters] == [
            ("unknown_model", "group.scored.p.former.g.j.main"),
            ("unknown_model", "group.scored.former.tiny.g.j.main"),
        ]
        assert await checkpoints(broker) == []  # a branch has a trainer of its own


async def test_groups_with_foreign_logprobs_take_no_healthy_ones_along(
    training: kit.Training, tiny_base: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["foreign0", "good0", "good1", "foreign1", "good2", "foreign2", "good3", "good4"]
    async with training(groups_per_step=8, logprob_bound=1e-3) as broker:
        for seed, name in enumerate(names):
            logprobs = None if name.startswith("foreign") else kit.logprobs_of(tiny_base, [5, 6], [7, 8 + seed])
            await kit.publish_calls(broker, name, [7, 8 + seed], logprobs=logprobs)
        letters = await reach(3, dead_letters, broker)
        assert {d.reason for d in letters} == {"sampler_mismatch"}
        assert "step 1 is not taken: the sampler's logprobs and the trainer's differ" in letters[0].detail
        assert {r.getMessage() for r in caplog.records if r.levelname == "ERROR"} == {"group moved to the dead letters"}
        assert [d.original_subject.split(".")[4] for d in letters] == ["foreign0", "foreign1", "foreign2"]
        for i in range(3):  # the five healthy ones still wait
            sampled = [7, 20 + i]
            await kit.publish_calls(broker, f"more{i}", sampled, logprobs=kit.logprobs_of(tiny_base, [5, 6], sampled))
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("good0", "good1", "good2", "good3", "good4", "more0", "more1", "more2")


async def test_rewards_of_groups_discarded_during_a_step_count_in_the_next_one(tiny_base: str, tmp_path: Path) -> None:
    config = kit.settings(tiny_base, tmp_path)
    learner = service.make_learners(config)["tiny"]
    batch = [kit.training_group(kit.group("g", [0.0, 1.0]), build("g-1", kit.turns("g-1", 1)))]
    learner.discarded.append(DiscardedGroup([1.0, 1.0], equal=True))
    pending = learner.train_step(batch)
    learner.discarded.append(DiscardedGroup([0.25, 0.25], equal=True))  # while the step's event goes to the log
    learner.make_current(pending)
    after = learner.train_step(batch).manifest.event.metrics
    before = pending.manifest.event.metrics
    assert (before["reward_mean_all"], before["no_variance_share"]) == (0.75, 0.5)
    assert (after["reward_mean_all"], after["no_variance_share"]) == (0.375, 0.5)
