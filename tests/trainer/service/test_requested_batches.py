"""Batches that an agent requests."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from journeywork.art.dev import loss_settings
from pipeline import streams
from pipeline.config import with_batch_settings
from pipeline.events import CheckpointPublished, GroupDiscarded, TrainingBatch
from pipeline.log.broker import Broker
from tests.kits.events import letter
from tests.kits.log import take
from tests.kits.waiting import until
from tests.trainer import kit
from tests.trainer.kit import all_acked, checkpoints, discards, running, steps_reach


def batch_request(*groups: str, rate: float | None = None) -> TrainingBatch:
    settings = {} if rate is None else {"optimizer.learning_rate": rate}
    return TrainingBatch(id="b", groups=groups, settings=json.dumps(settings).encode())


@pytest.mark.usefixtures("quick_redelivery")
async def test_a_requested_batch_is_a_step_of_its_own(settings: kit.Settings, broker: Broker) -> None:
    """However many groups a step takes otherwise; with its own learning rate; and after a restart."""
    config = settings(groups_per_step=3)
    request = batch_request("b0", "equal", "b1", rate=0.125)
    async with running(config):
        await kit.publish_group(broker, "plain0", [0.0, 1.0], seed=1)
        await kit.publish_group(broker, "b0", [0.0, 1.0], seed=2, batch=request)
        await kit.publish_group(broker, "equal", [0.5, 0.5], seed=3, batch=request)
        await until(partial(discards, broker))
        assert await checkpoints(broker) == []
    async with running(config):
        await kit.publish_group(broker, "b1", [0.0, 1.0], seed=4, batch=request)
        (first,) = await steps_reach(broker, 1)
        assert first.groups == ("b0", "b1")
        assert first.metrics["learning_rate"] == 0.125
        for n in (1, 2):
            await kit.publish_group(broker, f"plain{n}", [0.0, 1.0], seed=4 + n)
        second = (await steps_reach(broker, 2))[1]
        await all_acked(broker)
    assert second.groups == ("plain0", "plain1", "plain2")
    assert second.metrics["learning_rate"] == config.trainer.optimizer.learning_rate
    assert first.config_hash != second.config_hash


async def test_a_batch_of_another_key_with_the_same_id_is_another_batch(training: kit.Training) -> None:
    """It neither takes the learning rate away nor has a group wait for groups that never come."""
    theirs = TrainingBatch(id="b", groups=("b0", "never"), owner="bob")
    mine = TrainingBatch(id="b", groups=("a0",), settings=b'{"optimizer.learning_rate":0.125}', owner="alice")
    async with training(groups_per_step=3) as broker:
        await kit.publish_group(broker, "b0", [0.0, 1.0], seed=1, batch=theirs)
        await kit.publish_group(broker, "a0", [0.0, 1.0], seed=2, batch=mine)
        (event,) = await steps_reach(broker, 1)
    assert (event.groups, event.metrics["learning_rate"]) == (("a0",), 0.125)


_TASK: dict[str, object] = {"loss.baseline": "task", "loss.advantage_scaling": "none"}


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(
            {
                "alice": {"loss.type": "dapo", "loss.epsilon": 0.1, "loss.advantage_scaling": "none"},
                "bob": loss_settings(),
            },
            id="types of loss",
        ),
        pytest.param(
            {"alice": {**_TASK, "loss.turn_discount": 0.5}, "bob": {**_TASK, "loss.turn_discount": 0.25}},
            id="discounts of earlier runs",
        ),
    ],
)
async def test_two_callers_with_different_losses_each_get_their_own(
    on_new_log: kit.Settings, tmp_path: Path, losses: dict[str, dict[str, object]]
) -> None:
    """Their steps are those of an installation with the loss of the one, and then with that of the other."""
    trained: dict[str, list[CheckpointPublished]] = {}
    for way in ("asked", "set"):
        config = on_new_log(way, groups_per_step=1)
        async with Broker.connect(config.nats) as broker:
            for i, (owner, loss) in enumerate(losses.items()):
                batch, settings = None, config
                if way == "asked":
                    batch = TrainingBatch(id="b", groups=(owner,), settings=json.dumps(loss).encode(), owner=owner)
                else:
                    trainer = with_batch_settings(config.trainer, loss)
                    settings = msgspec.structs.replace(config, trainer=trainer)
                async with running(settings):
                    await kit.publish_group(broker, owner, [0.0, 1.0], seed=1 + i, step=i, batch=batch)
                    trained[way] = await steps_reach(broker, i + 1)
    for asked, by_setting in zip(trained["asked"], trained["set"], strict=True):
        assert asked.groups == by_setting.groups
        assert asked.metrics["grad_norm"] == pytest.approx(by_setting.metrics["grad_norm"], rel=1e-10)
    for step in (1, 2):
        folders = [tmp_path / way / "checkpoints/p/main" / kit.MODEL / f"step-{step:08d}" for way in trained]
        one, other = (load_file(folder / "adapter_model.safetensors") for folder in folders)
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-10


async def test_a_batch_that_trains_nothing_or_stays_incomplete_holds_nothing_up(training: kit.Training) -> None:
    async with training(groups_per_step=1, max_staleness=0) as broker:
        await kit.publish_group(broker, "equal", [0.5, 0.5], seed=1, batch=batch_request("equal"))
        await kit.publish_group(
            broker, "half", [0.0, 1.0], seed=2, batch=TrainingBatch(id="c", groups=("half", "never"))
        )
        await kit.publish_group(broker, "plain", [0.0, 1.0], seed=3)
        (event,) = await steps_reach(broker, 1)
        await all_acked(broker)
        reasons = {d.group: d.reason for d in await discards(broker)}
    assert event.groups == ("plain",)
    assert reasons == {"equal": "no_variance", "half": "stale"}


async def test_a_dead_lettered_group_is_not_queued_again_after_a_restart(settings: kit.Settings) -> None:
    """A predecessor died between the letter and the acknowledgement. One group's batch waits for the other group."""
    config = settings(groups_per_step=1)
    spec = streams.trainer_consumer("main")
    request = batch_request("bad", "good")
    async with Broker.connect(config.nats) as broker:
        await broker.provision_consumer(spec)
        await kit.publish_group(broker, "bad", [0.0, 1.0], seed=1, batch=request)
        async with broker.consume(spec) as consumption:
            (held,) = await take(consumption, 1)
            of_group = {"stream": "GROUPS", "stream_at": held.place.at, "original_subject": held.event.subject()}
            await broker.publish(letter(held.seq, consumer="trainer", reason="sampler_mismatch", **of_group))
        async with running(config):
            await kit.publish_group(broker, "good", [0.0, 1.0], seed=2, batch=request)
            (event,) = await steps_reach(broker, 1)
            await all_acked(broker)
    assert event.groups == ("good",)


async def test_a_batch_that_names_what_no_group_can_be_called_does_not_end_the_trainer(training: kit.Training) -> None:
    async with training(groups_per_step=1) as broker:
        await kit.publish_group(broker, "b0", [0.0, 1.0], seed=1, batch=batch_request("b0", "", "x" * 600))
        (event,) = await steps_reach(broker, 1)
    assert event.groups == ("b0",)


async def test_a_discarded_validation_group_does_not_settle_the_training_group_of_its_name(
    training: kit.Training,
) -> None:
    async with training(groups_per_step=1) as broker:
        await broker.publish(
            GroupDiscarded(
                project="p",
                group="b1",
                model=kit.MODEL,
                trajectories=(),
                reason="validation",
                by="trainer",
                split="val",
            )
        )
        await kit.publish_group(broker, "b0", [0.0, 1.0], seed=1, batch=batch_request("b0", "b1"))
        await kit.publish_group(broker, "plain", [0.0, 1.0], seed=2)
        await steps_reach(broker, 1)
        await kit.publish_group(broker, "b1", [0.0, 1.0], seed=3, batch=batch_request("b0", "b1"))
        assert [step.groups for step in await steps_reach(broker, 2)] == [("plain",), ("b0", "b1")]


async def test_supervised_steps_between_steps_of_rl_are_one_lineage(training: kit.Training) -> None:
    """Groups of one member with equal rewards, without logprobs, older than any step may be, in several updates."""
    names = ("d0", "d1", "d2")
    chosen = {"loss.type": "sft", "optimizer.learning_rate": 0.05, "optimizer.minibatches": 3}
    request = TrainingBatch(id="sft", groups=names, settings=json.dumps(chosen).encode())
    async with training(groups_per_step=1, max_staleness=0) as broker:
        await kit.publish_group(broker, "rl0", [0.0, 1.0], seed=1)
        await steps_reach(broker, 1)
        for i, name in enumerate(names):
            scored = kit.group(name, [1.0], batch=request)
            (member,) = scored.members
            for turn in kit.turns(member.trajectory, 50 + i):
                await broker.publish(msgspec.structs.replace(turn, logprobs=b""))
            await broker.publish(scored)
        await steps_reach(broker, 2)
        await kit.publish_group(broker, "rl1", [0.0, 1.0], seed=2, step=2)
        events = await steps_reach(broker, 3)
        await all_acked(broker)
        assert not await discards(broker)
    assert [e.groups for e in events] == [("rl0",), names, ("rl1",)]
    assert [e.parent for e in events] == ["tiny@0", "tiny@1", "tiny@2"]
    assert [e.metrics["updates"] for e in events] == [1, 3, 1]
    assert [e.metrics["learning_rate"] for e in events] == [0.01, 0.05, 0.01]
