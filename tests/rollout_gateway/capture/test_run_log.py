"""An expired trajectory is refused, and its id is not given again."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.names import new_dated_id
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Completion, Registry
from rollout_gateway.http.errors import ApiError

pytestmark = pytest.mark.anyio

TOKENS = TrajectoryTokens(b"0" * 32, "test")
OLD = "t-20200101T000000Z-" + "0" * 20


def opened(name: str) -> TrajectoryOpened:
    return TrajectoryOpened(project="test", trajectory=name, model="m", group="g")


async def test_an_expired_trajectory_is_refused_by_every_gateway_and_not_opened_again(
    nats_config: NatsConfig,
) -> None:
    short = msgspec.structs.replace(nats_config, rollouts_max_age_h=1.5 / 3600)
    names = ["mine", new_dated_id("t")]
    async with Broker.connect(short) as broker, Broker.connect(short) as second:
        here, there = Registry(broker, "test", TOKENS), Registry(second, "test", TOKENS)
        found = [await here.open(opened(name), "") for name in names]
        found[0].begin()
        found[0].end()
        assert await there.open(opened("mine"), "") is not found[0]  # a retry at another gateway
        with anyio.fail_after(60):
            while (await broker.js.stream_info("ROLLOUTS")).state.messages:
                await anyio.sleep(0.05)
        for name, trajectory in zip(names, found, strict=True):
            with pytest.raises(ApiError) as refused:
                trajectory.begin()
            assert (refused.value.status, refused.value.code) == (410, "trajectory_expired")
            with pytest.raises(ApiError, match="expired"):
                await here.complete(name, Completion(reward=1.0))
            for registry in (here, there, Registry(broker, "test", TOKENS)):
                with pytest.raises(ApiError, match="expired"):
                    await registry.open(opened(name), "")
        assert (await broker.js.stream_info("ROLLOUTS")).state.messages == 0


async def test_an_id_with_an_old_date_is_refused_without_reading_the_log(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        for call in (
            registry.find(OLD),
            registry.open(opened(OLD), ""),
            registry.complete(OLD, Completion()),
        ):
            with pytest.raises(ApiError, match="opened more than 48 hours ago"):
                await call
        assert (await broker.js.stream_info("IDS")).state.messages == 0
