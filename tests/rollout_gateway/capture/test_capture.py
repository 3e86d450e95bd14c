"""Completions by other replicas."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest

from pipeline.config import NatsConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Completion, Registry
from tests.rollout_gateway.conftest import PROJECT

pytestmark = pytest.mark.anyio


async def test_a_completion_elsewhere_is_heeded_though_it_came_while_this_replica_was_away(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as one, Broker.connect(nats_config) as two:
        here, there = (Registry(b, PROJECT, TrajectoryTokens(b"s" * 32, PROJECT)) for b in (one, two))
        await here.mark_position()
        await there.open(TrajectoryOpened(project=PROJECT, trajectory="t", model="m", group="g"), "")
        found = await here.find("t")
        await there.complete("t", Completion(reward=1.0))
        assert here.get("t") is found, "nothing was followed yet"
        async with anyio.create_task_group() as tg:
            tg.start_soon(here.follow_completions)
            with anyio.fail_after(60):
                while here.get("t") is not None:
                    await anyio.sleep(0.01)
            tg.cancel_scope.cancel()
        assert found.completing
