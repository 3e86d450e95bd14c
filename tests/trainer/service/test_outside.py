"""Groups of outside models are discarded by name: no trainer waits for them, and none is a dead letter."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeline.config import NatsConfig, OutsideConfig
from pipeline.log.broker import Broker
from tests.trainer import kit
from tests.trainer.kit import all_acked, checkpoints, dead_letters, discards, running

pytestmark = pytest.mark.anyio


async def test_group_of_an_outside_model_is_discarded(nats_config: NatsConfig, tiny_base: str, tmp_path: Path) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=1)
    config = msgspec.structs.replace(config, outside=(OutsideConfig(name="master", url="http://x/v1"),))
    async with Broker.connect(nats_config) as broker, running(config):
        await broker.publish(kit.group("g", [0.0, 1.0], model="master"))
        await all_acked(broker)
        (discard,) = await discards(broker)
        assert (discard.model, discard.reason, discard.trajectories) == ("master", "outside_model", ("g-0", "g-1"))
        assert "no token of these runs is a policy's" in discard.detail
        assert [letter async for letter in dead_letters(broker)] == []
        assert await checkpoints(broker) == []
