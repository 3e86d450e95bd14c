"""Groups that wait for a requested batch, or end the trainer: what they cost the groups of others."""

from dataclasses import replace
from functools import partial

import pytest

from pipeline import streams
from pipeline.events import TrainingBatch
from pipeline.log.broker import Broker
from tests.kits.waiting import until
from tests.trainer import kit
from tests.trainer.kit import all_acked, dead_letters, dies_of, discards, running, steps_reach
from trainer import service


async def publish_incomplete(broker: Broker, name: str, owner: str = "") -> None:
    """A group whose requested batch waits for another one, which never comes."""
    batch = TrainingBatch(id=f"batch-{name}", groups=(name, "never"), owner=owner)
    await broker.publish(kit.group(name, [0.0, 1.0], batch=batch, owner=owner))


async def held_by_the_trainer(broker: Broker) -> int:
    return int((await broker.consumer_info(streams.consumer("trainer"))).num_ack_pending or 0)


@pytest.mark.usefixtures("quick_redelivery")
async def test_groups_that_wait_hold_up_no_other_after_a_restart(
    settings: kit.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each was handled alone for a second, and 2,700 of them stopped training for 45 minutes."""
    monkeypatch.setattr("pipeline.log.consumer.ALONE_S", 3600.0)
    config = settings(groups_per_step=1)
    async with Broker.connect(config.nats) as broker:
        for i in range(3):
            await publish_incomplete(broker, f"g{i}")
        async with running(config):

            async def all_held() -> bool:
                return await held_by_the_trainer(broker) == 3

            await until(all_held)
        async with running(config):
            for step in range(2):
                await kit.publish_group(broker, f"plain{step}", [0.0, 1.0], seed=step, step=step)
                events = await steps_reach(broker, step + 1)
    assert [event.groups for event in events] == [("plain0",), ("plain1",)]


async def test_a_batch_that_stays_incomplete_ends_after_its_time_limit(training: kit.Training) -> None:
    async with training(batch_timeout_s=0.1) as broker:
        await publish_incomplete(broker, "half", "alice")
        (discard,) = await until(partial(discards, broker))
    assert (discard.group, discard.reason, discard.owner) == ("half", "incomplete", "alice")
    assert "no group of batch batch-half was scored or discarded for 0.1 s" in discard.detail


async def test_one_key_does_not_fill_the_trainer_with_batches_that_stay_incomplete(
    training: kit.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what the log delivers without an acknowledgement may wait. The oldest batches of who has most end."""
    consumers = tuple(replace(c, max_ack_pending=4) if c.name == "trainer" else c for c in streams.CONSUMERS)
    monkeypatch.setattr(streams, "CONSUMERS", consumers)
    async with training(groups_per_step=1) as broker:
        await publish_incomplete(broker, "b0", "bob")
        for i in range(6):
            await publish_incomplete(broker, f"a{i}", "alice")
        await kit.publish_group(broker, "plain", [0.0, 1.0], seed=1)
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("plain",)
        assert [(d.group, d.reason) for d in await discards(broker)] == [(f"a{i}", "incomplete") for i in range(5)]


@pytest.mark.usefixtures("quick_redelivery")
async def test_a_group_that_ends_the_trainer_is_the_only_dead_letter_of_its_batch(
    settings: kit.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the group that happened to be delivered again when the trainer died was counted as the cause."""
    monkeypatch.setattr("pipeline.log.consumer.ALONE_S", 3600.0)
    monkeypatch.setattr("trainer.learner.MAX_ATTEMPTS", 3)
    dies_of("killer", monkeypatch)
    config = settings(groups_per_step=5)
    names = ["good0", "good1", "killer", "good2", "good3", "good4"]
    async with Broker.connect(config.nats) as broker:
        for i, name in enumerate(names):
            await kit.publish_group(broker, name, [0.0, 1.0], seed=i)
        for _ in range(5):  # three times in the batch, twice alone
            with pytest.raises(ExceptionGroup):
                await service.serve(config, lambda **_: None)
        async with running(config):
            (event,) = await steps_reach(broker, 1)
            await all_acked(broker)
        assert event.groups == ("good0", "good1", "good2", "good3", "good4")
        (letter,) = await dead_letters(broker)
        assert (letter.reason, letter.original_subject.split(".")[4]) == ("untrainable", "killer")
        assert "the trainer died or failed 2 times" in letter.detail
