"""Following a stream through a power cut that takes the end of the log."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.errors import LogShrankError
from pipeline.log import follow
from pipeline.log.broker import Broker
from pipeline.log.messages import Place
from rollout_gateway.serving.policies import Policies
from tests.conftest import NatsServer
from tests.kits.events import checkpoint
from tests.kits.power import Power

pytestmark = pytest.mark.anyio


async def test_a_log_that_lost_its_end_ends_who_follows_it(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        await broker.publish(checkpoint(1))
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        for step in range(2, 5):
            await broker.publish(checkpoint(step))
        policies = Policies("p", ["m"])
        await policies.rebuild(broker)

        async def follow_to_the_end() -> None:
            with pytest.raises(LogShrankError, match="lost its end: POLICY no longer holds message 4"):
                await policies.follow(broker, lambda _: None)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tg:
                tg.start_soon(follow_to_the_end)
                await power.cut()
                await broker.publish(checkpoint(2))


async def test_messages_that_retention_took_are_no_loss(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    """The reader's last message is deleted and the server starts anew: nothing is read twice."""
    async with Broker.connect(nats_config) as broker, anyio.create_task_group() as tg:
        for step in range(1, 4):
            await broker.publish(checkpoint(step))
        policies, seen = Policies("p", ["m"]), list[str]()
        await policies.rebuild(broker)
        apply = policies.apply

        def counted(recorded: object) -> bool:
            seen.append(recorded.event.version)  # type: ignore[attr-defined]
            return apply(recorded)  # type: ignore[arg-type]

        policies.apply = counted  # type: ignore[method-assign, assignment]
        tg.start_soon(policies.follow, broker, lambda _: None)
        await broker.publish(checkpoint(4))
        with anyio.fail_after(60):
            while seen != ["m@4"]:
                await anyio.sleep(0.02)
            await broker.js.delete_msg("POLICY", 4)
            nats_server.kill()
            await anyio.to_thread.run_sync(nats_server.start)
            await broker.publish(checkpoint(5))
            while len(seen) < 2:
                await anyio.sleep(0.02)
        assert seen == ["m@4", "m@5"]
        tg.cancel_scope.cancel()


async def test_between_two_servers_no_consumer_is_created(nats_server: NatsServer, broker: Broker) -> None:
    """nats-py would leave out its name, so that a service's right to create it would not cover the request."""
    nats_server.kill()
    with anyio.fail_after(30):
        while broker.client.is_connected:
            await anyio.sleep(0.01)
    with pytest.raises(nats.errors.ConnectionReconnectingError):
        await follow._create_consumer(broker, "POLICY", ["policy.>"], Place(0, 0))
    await anyio.to_thread.run_sync(nats_server.start)
    with anyio.fail_after(60):
        while not broker.client.is_connected:
            await anyio.sleep(0.01)
    assert await follow._create_consumer(broker, "POLICY", ["policy.>"], Place(0, 0))
