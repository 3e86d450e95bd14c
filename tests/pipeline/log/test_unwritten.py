"""The operator hears of events that the log deletes before the store has written them."""

from functools import partial

import anyio
import msgspec

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.unwritten import Unwritten, UnwrittenEvents
from tests.kits.events import exchange
from tests.kits.log import emptied, take
from tests.kits.waiting import until


async def test_a_store_that_is_behind_raises_an_alarm_and_a_loss_another(nats_config: NatsConfig) -> None:
    short = msgspec.structs.replace(nats_config, rollouts_max_age_h=2 / 3600)
    watched = UnwrittenEvents(0.5)
    async with Broker.connect(short) as broker:
        assert await watched.check(broker) == []
        await broker.publish(exchange())
        found = await until(partial(watched.check, broker))
        with anyio.fail_after(60):
            while not any(loss.detail.startswith("ROLLOUTS deleted events") for loss in found):
                assert any(loss.detail.startswith("store-rollouts has not written") for loss in found)
                assert min(loss.share for loss in found) >= 0.5
                await anyio.sleep(0.05)
                found = await watched.check(broker)
        (lost,) = found
        assert lost == Unwritten("store-rollouts", 1.0, lost.detail)
        assert "from message 1 on" in lost.detail
        assert await watched.check(broker) == found  # a loss is not forgotten


async def test_events_that_the_store_wrote_raise_no_alarm(nats_config: NatsConfig) -> None:
    short = msgspec.structs.replace(nats_config, rollouts_max_age_h=6 / 3600)
    watched = UnwrittenEvents(0.5)
    async with Broker.connect(short) as broker:
        async with broker.consume(streams.consumer("store-rollouts")) as messages:
            await broker.publish(exchange())
            (held,) = await take(messages, 1)
            await held.ack(confirmed=True)
        await watched.check(broker)
        await emptied(broker, "ROLLOUTS")
        assert await watched.check(broker) == []
