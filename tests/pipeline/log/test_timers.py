"""Timers: what the server delivers at its time, also after a restart, unless it is cancelled."""

import time

import anyio
import anyio.to_thread

from pipeline.config import NatsConfig
from pipeline.events import GroupTimedOut
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.kits.log import emptied, take


def timeout(group: str, timeout_s: float = 1.0) -> GroupTimedOut:
    return GroupTimedOut(project="p", model="m", group=group, timeout_s=timeout_s)


async def test_a_timer_is_delivered_at_its_time_and_then_gone(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker, broker.consume("judge-timers") as due:
        past, soon = time.time() - 3600, time.time() + 0.3
        await broker.set_timer(timeout("past"), past)
        await broker.set_timer(timeout("replaced", 1.0), time.time() + 3600)
        await broker.set_timer(timeout("replaced", 2.0), soon)
        found = {}
        with anyio.fail_after(60):
            while len(found) < 2:
                for delivery in await due.batch(10):
                    assert isinstance(delivery.event, GroupTimedOut)
                    found[delivery.event.group] = delivery.event, delivery.place.at / 1e6
                    await delivery.ack()
        assert set(found) == {"past", "replaced"}
        assert found["replaced"][0].timeout_s == 2.0
        assert found["replaced"][1] >= soon
        await emptied(broker, "TIMERS")


async def test_timers_survive_the_server_and_those_it_missed_are_delivered(
    nats_server: NatsServer, nats_config: NatsConfig
) -> None:
    async with Broker.connect(nats_config) as broker, broker.consume("judge-timers") as due:
        at = time.time() + 0.5
        await broker.set_timer(timeout("g"), at)
        nats_server.kill()
        while time.time() < at:
            await anyio.sleep(0.05)  # it is due while the server is away
        await anyio.to_thread.run_sync(nats_server.start)
        (held,) = await take(due, 1)
        assert held.event.message_id() == timeout("g").message_id()
        await held.ack()
        await emptied(broker, "TIMERS")


async def test_a_delivery_that_is_given_back_comes_again_after_the_delay(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker, broker.consume("judge-timers") as due:
        await broker.set_timer(timeout("g"), 0.0)
        (first,) = await take(due, 1)
        before = time.monotonic()
        await first.give_back(0.5)
        assert not due.unsettled
        (again,) = await take(due, 1)
        assert time.monotonic() - before >= 0.5
        assert again.deliveries == 2
        await again.ack()
