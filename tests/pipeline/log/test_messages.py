"""After a power cut, the same sequence may belong to another event."""

from pathlib import Path

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import TrajectoryCompleted
from pipeline.log.broker import Broker
from pipeline.log.messages import Place, parse_ack_subject
from tests.conftest import NatsServer
from tests.kits.events import completed
from tests.kits.log import take
from tests.kits.power import Power


async def test_a_delivery_and_a_read_agree(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker, broker.consume("judge") as messages:
        await broker.publish(completed("t"))
        (delivery,) = await take(messages, 1)
        place = (await broker.read_at(TrajectoryCompleted, delivery.seq)).place
        assert delivery.place == place
        assert place.at > 0
        assert await broker.holds("ROLLOUTS", place)
        assert not await broker.holds("ROLLOUTS", Place(place.seq, place.at + 1))
        assert await broker.holds("ROLLOUTS", Place(place.seq, 0))


def test_a_reply_subject_of_a_larger_system_is_read_alike() -> None:
    here = "$JS.ACK.S.c.3.17.5.1700000000123456789.0"
    there = "$JS.ACK.hub.ACCOUNT.S.c.3.17.5.1700000000123456789.0.random"
    assert parse_ack_subject(here) == parse_ack_subject(there) == (3, Place(17, 1700000000123456))


async def test_an_acknowledgement_does_not_swallow_what_came_under_its_number(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config):
        pass
    await power.synced()
    async with Broker.connect(nats_config) as broker, broker.consume("judge") as messages:
        for name in ("old0", "old1"):
            await broker.publish(completed(name))
        held = await take(messages, 2)
        await power.cut()
        for name in ("new0", "new1"):
            await broker.publish(completed(name))
        fresh = await take(messages, 2)
        assert [d.seq for d in fresh] == [d.seq for d in held]
        for delivery in held:
            await delivery.ack(confirmed=True)
        info = await broker.consumer_info(streams.consumer("judge"))
        assert info.num_ack_pending == 2  # those of the new ones
        for delivery in fresh:
            await delivery.ack(confirmed=True)
        assert await broker.lag("judge") == 0
