"""Dead letters: listed, shown, given back to the one consumer that failed, dropped."""

import dataclasses
import hashlib
import json
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.commands import dead_letters as dead
from pipeline.config import Config, NatsConfig, save
from pipeline.events import DeadLettered, Event, GroupScored, TrajectoryCompleted, encode
from pipeline.log.broker import Broker
from tests.kits.events import completed, letter
from tests.kits.log import acknowledged, take


async def make_dead_letter(broker: Broker, payload: bytes, detail: str = "why") -> None:
    """A letter that the judge gave up, as a fault that is gone now would leave it."""
    told = {"detail": detail, "payload": payload, "headers": {"traceparent": "tp"}}
    await broker.publish(letter(original_subject="rollout.completed.p.m.t1", **told))


async def test_a_retry_reaches_the_consumer_that_failed_and_no_other(broker: Broker) -> None:
    await make_dead_letter(broker, encode(completed()))
    (letter,) = await dead.find(broker, [1])
    await dead.retry(broker, letter)
    assert await broker.read(DeadLettered) == []
    async with broker.consume("judge") as judge, broker.consume("telemetry-rollouts") as other:
        (delivery,) = await take(judge, 1)
        assert isinstance(delivery.event, TrajectoryCompleted)
        assert delivery.headers["traceparent"] == "tp"
        await delivery.ack(confirmed=True)
        assert await other.batch(10, wait_s=0.5) == []
        assert await judge.batch(10, wait_s=0.3) == []
    await acknowledged(broker, "telemetry-rollouts")


async def test_a_retry_that_is_repeated_is_one_delivery(broker: Broker) -> None:
    await make_dead_letter(broker, encode(completed()))
    (letter,) = await broker.read(DeadLettered)
    # A death between publishing and taking off the list: the command is given again.
    seq, at = letter.place
    await broker.publish_raw(f"rollout.completed.p.m.t1.retry-{seq}-{at}", b"x", {})
    await dead.retry(broker, letter)
    assert (await broker.stream_info("ROLLOUTS")).config.subjects == ["rollout.>", "alive.ROLLOUTS"]
    assert (await broker.stream_info("ROLLOUTS")).state.messages == 1


async def test_a_message_under_a_lost_number_is_a_letter_of_its_own(broker: Broker) -> None:
    """A stream that lost its end counts the same numbers again: here it lost all of it."""
    for payload in (b"\xc1before", b"\xc1after"):
        await broker.js.publish("rollout.completed.p.m.x", payload)
        async with broker.consume("judge") as judge:
            assert await judge.batch(10, wait_s=60) == []
        await broker.js.delete_stream("ROLLOUTS")
        await broker.provision()
    letters = [r.event for r in await broker.read(DeadLettered)]
    facts = [(x.reason, x.stream_seq, x.payload) for x in letters]
    assert facts == [("undecodable", 1, b"\xc1before"), ("undecodable", 1, b"\xc1after")]
    assert 0 < letters[0].stream_at < letters[1].stream_at


def test_the_command(nats_config: NatsConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        async with Broker.connect(nats_config) as broker:
            await make_dead_letter(broker, b"\xc1 not an event", detail="no [/field] \x1b[2J")

    anyio.run(fill)
    save(Config(nats=nats_config), tmp_path / "config.toml")
    where = ["--config", str(tmp_path / "config.toml")]
    dead.main(["list", "--json", *where])
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["seq"], row["consumer"], row["reason"]) == (1, "judge", "undecodable")
    dead.main(["list", *where])
    assert "no [/field] \\x1b[2J" in " ".join(capfd.readouterr().out.split())
    dead.main(["show", "1", *where])
    assert "not an event" in json.loads(capfd.readouterr().out)["payload"]
    with pytest.raises(SystemExit, match="1"):
        dead.main(["drop", *where])
    assert "--all" in capfd.readouterr().err
    dead.main(["drop", "--all", *where])
    with pytest.raises(SystemExit, match="1"):
        dead.main(["show", "1", *where])
    assert "no dead letter 1" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        dead.main(["list", "--run-dir", "nowhere"])
    assert "nowhere" in capfd.readouterr().err


async def deliver_in_vain(broker: Broker, consumer: str, times: int) -> None:
    """As `times` lives of a service that die over what they were given."""
    spec = streams.consumer(consumer)
    sub = await broker.js.pull_subscribe_bind(consumer=spec.name, stream=spec.stream)
    for _ in range(times):
        (message,) = await sub.fetch(1, timeout=60)
        await message.nak()
    await sub.unsubscribe()


@pytest.mark.parametrize("consumer", ["judge", "trainer"])
async def test_what_fails_max_deliver_times_is_a_dead_letter(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch, consumer: str
) -> None:
    few = tuple(dataclasses.replace(c, max_deliver=3) for c in streams.CONSUMERS)
    monkeypatch.setattr(streams, "CONSUMERS", few)
    async with Broker.connect(nats_config) as broker:
        bad: Event = completed("bad")
        if streams.consumer(consumer).stream == "GROUPS":
            bad = GroupScored(project="p", group="g", model="m", judge="j", members=())
        ack = await broker.publish(bad)
        await deliver_in_vain(broker, consumer, 2)
        async with broker.consume(consumer) as messages:
            # The third delivery is still one.
            (delivery,) = await take(messages, 1)
            assert delivery.deliveries == 3
            await messages.close(None)
            while not (letters := await broker.read(DeadLettered)):
                assert await messages.batch(1) == []
        (letter,) = letters
        event = letter.event
        assert (event.reason, event.consumer, event.deliveries) == ("max_deliver", consumer, 4)
        assert (event.stream, event.stream_seq, event.payload) == (ack.stream, ack.seq, encode(bad))
        assert await broker.lag(consumer) == 0
        # It does not block what comes after, and the retry counts from the start.
        await dead.retry(broker, letter)
        async with broker.consume(consumer) as messages:
            (delivery,) = await take(messages, 1)
            assert (delivery.event, delivery.deliveries) == (bad, 1)
            await delivery.ack(confirmed=True)


async def test_a_dead_letter_outlives_the_object_that_its_message_named(broker: Broker) -> None:
    """The claim is redeemed when the letter is written: it may be kept longer than the object."""
    large = msgspec.structs.replace(completed(), metadata=b'"' + b"x" * 2_000_000 + b'"')
    await broker.publish(large)
    async with broker.consume("judge") as judge:
        (delivery,) = await take(judge, 1)
        await broker.dead_letter(delivery.message, judge.spec, "max_deliver", "why")
        judge.unsettled.clear()
    await (await broker.js.object_store("CLAIMS_ROLLOUTS")).delete(hashlib.sha256(encode(large)).hexdigest())
    (letter,) = await broker.read(DeadLettered)
    assert letter.event.payload == encode(large)
    await dead.retry(broker, letter)
    async with broker.consume("judge") as judge:
        (delivery,) = await take(judge, 1)
        assert delivery.event == large
        await delivery.ack(confirmed=True)
