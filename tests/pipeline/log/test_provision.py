"""A change of the table of streams changes the limits of streams that hold data."""

import dataclasses

import anyio
import msgspec
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from tests.kits.events import completed, exchange
from tests.kits.log import emptied, take


async def test_changed_limits_reach_a_stream_and_a_consumer_that_hold_data(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker.connect(nats_config) as broker:
        for seq in range(50):
            await broker.publish(exchange(seq=seq))
        await broker.publish(completed())
        async with broker.consume("judge") as messages:
            (held,) = await take(messages, 1)
            await held.ack(confirmed=True)

    changed = tuple(
        dataclasses.replace(s, share=0.5, duplicate_window_s=60.0) if s.name == "ROLLOUTS" else s
        for s in streams.STREAMS
    )
    monkeypatch.setattr(streams, "STREAMS", changed)
    consumers = tuple(dataclasses.replace(c, ack_wait_s=33.0, max_ack_pending=77) for c in streams.CONSUMERS)
    monkeypatch.setattr(streams, "CONSUMERS", consumers)

    limited = msgspec.structs.replace(nats_config, max_bytes=100_000_000, rollouts_max_age_h=120)
    async with Broker.connect(limited) as broker:
        info = await broker.stream_info("ROLLOUTS")
        assert (info.config.max_age, info.config.max_bytes) == (5 * streams.DAY_S, 50_000_000)
        assert info.config.duplicate_window == 60.0
        assert info.state.messages == 51
        consumer = await broker.consumer_info(streams.consumer("judge"))
        assert (consumer.config.ack_wait, consumer.config.max_ack_pending) == (33.0, 77)
        # What was acknowledged before stays acknowledged.
        assert (consumer.num_pending, consumer.num_ack_pending) == (0, 0)
        assert len(await broker.read(ExchangeRecorded)) == 50


async def test_what_is_as_it_should_be_is_not_written_again(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server adds defaults to what was not set: a second start found them to differ."""
    async with Broker.connect(nats_config):
        pass
    changed: list[str] = []

    async def update(self: JetStreamContext, config: StreamConfig) -> None:
        changed.append(str(config.name))

    monkeypatch.setattr(JetStreamContext, "update_stream", update)
    async with Broker.connect(nats_config):
        pass
    assert changed == []


async def test_a_claimed_object_lives_as_long_as_its_message_and_then_goes(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = exchange(request=b'"' + b"x" * 2_000_000 + b'"')
    async with Broker.connect(nats_config) as broker:
        await broker.publish(exchange(seq=7))  # a bucket that exists gets the new age
        async with broker.consume("judge") as judged, broker.consume("store-rollouts") as stored:
            await broker.publish(completed())
            for messages, waiting in ((judged, 1), (stored, 2)):
                for delivery in await take(messages, waiting):
                    await delivery.ack(confirmed=True)
    monkeypatch.setattr(streams, "CLAIM_MARGIN_S", 3.0)
    async with Broker.connect(msgspec.structs.replace(nats_config, rollouts_max_age_h=1.5 / 3600)) as broker:
        ack = await broker.publish(large)
        with anyio.fail_after(60):
            while True:
                try:
                    claim = (await broker.js.get_msg("ROLLOUTS", ack.seq)).data
                except nats.js.errors.NotFoundError:
                    break
                assert claim is not None
                # As long as the message is there, so is what it names.
                assert await broker.decode(claim) == large
                await anyio.sleep(0.05)
        await emptied(broker, "OBJ_CLAIMS_ROLLOUTS")
        assert (await broker.stream_info("OBJ_CLAIMS_POLICY")).config.max_age in (0, None)
