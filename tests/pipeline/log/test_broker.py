"""The broker against a real NATS server."""

import pytest

from pipeline.log.broker import Broker, HistoryGoneError
from tests.kits.events import completed, exchange


async def test_only_a_publish_without_a_condition_has_a_message_id(broker: Broker) -> None:
    """The server keeps each id in memory for the deduplication window: two minutes of all calls would be most of its
    heap."""
    acks = [
        await broker.publish(completed()),
        await broker.publish(exchange(), after=0),
        await broker.publish(exchange("t2")),
    ]
    messages = [await broker.leader_get("ROLLOUTS", {"seq": ack.seq}) for ack in acks]
    ids = [m.headers.get("Nats-Msg-Id", "") for m in messages if m is not None]
    assert ids == ["", "", exchange("t2").message_id()]
    assert (await broker.publish(exchange("t2"))).duplicate


async def test_a_repeated_publish_finds_its_own_message_behind_which_others_came(broker: Broker) -> None:
    event = exchange(seq=0)
    first = await broker.publish(event, after=0)
    last = await broker.publish(exchange(seq=1), after=first.seq)
    again = await broker.publish(event, after=0)
    assert (again.seq, again.duplicate) == (first.seq, True)
    other = await broker.publish(exchange(seq=2), after=0)
    assert (other.seq, other.duplicate) == (last.seq, True)


async def test_objects_come_back_and_missing_ones_say_so(broker: Broker) -> None:
    await broker.put_object("ADAPTERS", "m@1", b"abc")
    assert await broker.get_object("ADAPTERS", "m@1") == b"abc"
    with pytest.raises(HistoryGoneError):
        await broker.get_object("ADAPTERS", "m@2")
