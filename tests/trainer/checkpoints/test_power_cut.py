"""A power cut takes the end of the log, while checkpoints on the disk are ahead of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from pipeline.config import Config, NatsConfig
from pipeline.errors import leaves
from pipeline.events import GroupScored, unpack_seqs
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.kits.power import Power
from tests.trainer import kit
from tests.trainer.kit import all_acked, checkpoints, discards, running, steps_reach
from trainer import service
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.commits import LogShrankError, TrainerError

pytestmark = pytest.mark.usefixtures("quick_redelivery")


@pytest.fixture
def power(nats_server: NatsServer, tmp_path: Path) -> Power:
    return Power(nats_server, tmp_path)


@pytest.fixture
async def power_with_streams(power: Power, nats_config: NatsConfig) -> Power:
    """The streams are made, and survive a cut."""
    async with Broker.connect(nats_config):
        pass
    await power.synced()
    return power


@asynccontextmanager
async def ended_by_the_cut(config: Config) -> AsyncIterator[None]:
    """The trainer service, which has to end because its log lost its end in the block."""
    lost: list[BaseException] = []
    try:
        async with running(config):
            yield
            with anyio.fail_after(60):
                await anyio.sleep_forever()
    except* LogShrankError as group:
        lost = leaves(group)
    (error,) = lost
    assert str(error).startswith("the log lost its end: ")


@pytest.mark.parametrize("keep_consumers", [False, True])
@pytest.mark.slow
async def test_checkpoints_that_the_log_lost_are_published_again_from_disk(
    settings: kit.Settings, power: Power, keep_consumers: bool
) -> None:
    config = settings(groups_per_step=1, keep_checkpoints=9)
    async with Broker.connect(config.nats) as broker, running(config):
        for i in range(2):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
        await steps_reach(broker, 2)
        await all_acked(broker)
    await power.synced()
    async with Broker.connect(config.nats) as broker, running(config):
        for i in range(2, 5):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=2)
        before = await steps_reach(broker, 5)
        await all_acked(broker)
    await power.cut(keep_consumers=keep_consumers)

    async with Broker.connect(config.nats) as broker:
        assert len(await checkpoints(broker)) == 2
        async with running(config) as facts:
            assert facts == {"step": 5}
            assert await checkpoints(broker) == before  # the same events in the same order
            for event in before:
                assert await broker.get_object("ADAPTERS", event.adapter)
            # GROUPS counts the same numbers again: for new groups, which all train, and for one that was lost and is
            # scored again, which does not train twice.
            await kit.publish_group(broker, "g3", [0.0, 1.0], seed=3, step=2)
            for i in range(10, 13):
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=5)
            events = await steps_reach(broker, 8)
            await all_acked(broker)
        assert [e.groups for e in events] == [(f"g{i}",) for i in (0, 1, 2, 3, 4, 10, 11, 12)]
        assert [(d.group, d.reason) for d in await discards(broker)] == [("g3", "repeated")]
        seqs = [int(unpack_seqs(e.group_seqs)[0]) for e in events]
        assert len(set(seqs)) < len(seqs)  # else the test proves nothing: a number stands for two groups
        places = {(s, int(unpack_seqs(e.group_times)[0])) for s, e in zip(seqs, events, strict=True)}
        assert len(places) == 8
        scored = {r.place for r in await broker.read(GroupScored)}
        assert {tuple(p) for p in scored} & places


async def test_after_a_power_cut_of_the_log_a_running_trainer_trains_new_groups(
    settings: kit.Settings, power_with_streams: Power
) -> None:
    """The log's machine alone lost its power. The trainer sees it when its connection is back, ends, and reads the log
    anew at its next start."""
    config = settings(groups_per_step=1)
    async with Broker.connect(config.nats) as broker:
        async with ended_by_the_cut(config):
            for i in range(3):
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
            before = await steps_reach(broker, 3)
            await all_acked(broker)
            await power_with_streams.cut()
        async with running(config):
            assert await steps_reach(broker, 3) == before  # without waiting for a step
            for i in range(10, 13):
                await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=3)
            events = await steps_reach(broker, 6)
        assert events[:3] == before
        assert [e.groups for e in events[3:]] == [("g10",), ("g11",), ("g12",)]


async def test_a_step_is_not_published_behind_one_that_the_log_lost(
    settings: kit.Settings, power_with_streams: Power, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut comes while a step is computed, before the trainer looks after the log."""
    monkeypatch.setattr(service, "_RECONNECT_CHECK_S", 3600.0)
    config = settings(groups_per_step=1)
    async with Broker.connect(config.nats) as broker:
        async with ended_by_the_cut(config):
            await kit.publish_group(broker, "g0", [0.0, 1.0], seed=0)
            before = await steps_reach(broker, 1)
            await all_acked(broker)
            await power_with_streams.cut()
            await kit.publish_group(broker, "g1", [0.0, 1.0], seed=1, step=1)
        async with running(config):
            events = await steps_reach(broker, 2)
        assert events[:1] == before
        assert events[1].groups == ("g1",)


async def test_steps_that_neither_log_nor_disk_holds_are_reported_and_training_continues(
    settings: kit.Settings, power: Power, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(groups_per_step=1, keep_checkpoints=1, max_staleness=0)
    async with Broker.connect(config.nats) as broker, running(config):
        await kit.publish_group(broker, "g0", [0.0, 1.0], seed=0)
        await steps_reach(broker, 1)
    await power.synced()
    async with Broker.connect(config.nats) as broker, running(config):
        for i in range(1, 5):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i, step=i)
            before = await steps_reach(broker, i + 1)
    await power.cut()
    held = Checkpoints.of(config, kit.MODEL).steps()
    assert held[0] > 2
    async with Broker.connect(config.nats) as broker:
        async with running(config) as facts:
            assert facts == {"step": 5}
            assert await checkpoints(broker) == [before[0], *before[held[0] - 1 :]]
        assert any(r.message == "steps lost" for r in caplog.records)


async def test_a_disk_that_diverged_from_the_log_is_refused(
    nats_config: NatsConfig, tiny_base: str, tmp_path: Path, power_with_streams: Power
) -> None:
    """The disk went another way than the log: publishing it would give one version two meanings."""
    config = kit.settings(tiny_base, tmp_path / "a", nats_config, groups_per_step=1)
    other = kit.settings(tiny_base, tmp_path / "b", nats_config, groups_per_step=1)
    async with Broker.connect(nats_config) as broker, running(config):
        for i in range(3):
            await kit.publish_group(broker, f"g{i}", [0.0, 1.0], seed=i)
        await steps_reach(broker, 3)
    await power_with_streams.cut()
    async with Broker.connect(nats_config) as broker, running(other):
        await kit.publish_group(broker, "else", [0.0, 1.0], seed=9)
        await steps_reach(broker, 1)
    with pytest.raises(TrainerError, match="checkpoints of another log"):
        await service.serve(config, lambda **_: None)
