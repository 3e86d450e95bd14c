"""Reads of the log that a lagging replica answers."""

from typing import Any

import pytest

from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from tests.kits.events import exchange


class Lagging:
    """Answers direct gets as a replica would that holds the first `held` messages only, and gets `gets` more between
    two of them."""

    def __init__(self, broker: Broker, held: int, gets: int = 0) -> None:
        self._ask, self.held, self.gets, self.asked = broker._direct_get, held, gets, 0

    async def __call__(self, stream: str, request: dict[str, Any]) -> tuple[list[StoredMessage], bool]:
        self.asked += 1
        page, more = await self._ask(stream, request)
        known = [m for m in page if m.seq <= self.held]
        self.held += self.gets
        return known, more and len(known) == len(page)


@pytest.mark.parametrize("held", [0, 1, 7, 9])
async def test_a_replica_that_lags_hides_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    for seq in range(10):
        await broker.publish(exchange(seq=seq))
    data = bytes(range(256)) * 2000
    monkeypatch.setattr(broker, "_direct_get", Lagging(broker, held))
    history = await broker.read(ExchangeRecorded, project="p", trajectory="t1")
    assert [r.event.seq for r in history] == list(range(10))
    assert [r.seq async for r in broker.messages("ROLLOUTS", 1, 10)] == list(range(1, 11))
    assert (await broker.read_at(ExchangeRecorded, 10)).seq == 10
    last = await broker.read_last(ExchangeRecorded, project="p")
    assert last is not None
    assert last.seq == 10
    await broker.put_object("ADAPTERS", "m@1", data)
    assert await broker.get_object("ADAPTERS", "m@1") == data


@pytest.mark.parametrize("server_limit", [False, True])
async def test_the_newest_message_of_each_subject_in_pages(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, server_limit: bool
) -> None:
    monkeypatch.setattr("pipeline.log.stream_reader._BATCH", 1000 if server_limit else 3)
    for number in range(1030 if server_limit else 8):  # the server looks up 1,024 subjects at once
        await broker.client.publish(f"rollout.completed.p.m.g.t{number}", b"x")
    await broker.client.flush()
    for seq in range(2):
        await broker.publish(exchange("one", seq=seq))
    wanted = ["rollout.exchange.p.one", "rollout.completed.p.m.g.>", "rollout.completed.p.m.none.>"]
    found = [m.seq for m in await broker.newest_messages("ROLLOUTS", wanted)]
    last = (await broker.stream_info("ROLLOUTS")).state.last_seq
    assert found == [*range(1, 1031 if server_limit else 9), last]


async def test_the_newest_messages_when_another_replica_that_lags_answers_for_the_second_page(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second replica lacks the newest message of a subject, and still has the one before as its newest."""
    monkeypatch.setattr("pipeline.log.stream_reader._BATCH", 3)
    for name in "bacdeb":  # the newest of b is on the second page
        await broker.js.publish(f"rollout.completed.p.m.g.{name}", b"x")
    lagging, ask = Lagging(broker, 5), broker._direct_get

    async def answer(stream: str, request: dict[str, Any]) -> tuple[list[Any], bool]:
        lagging.asked += 1
        return await (ask if lagging.asked == 1 else lagging)(stream, request)

    monkeypatch.setattr(broker, "_direct_get", answer)
    found = await broker.newest_messages("ROLLOUTS", ["rollout.completed.p.m.g.>"])
    assert [(m.seq, m.subject[-1]) for m in found] == [(2, "a"), (3, "c"), (4, "d"), (5, "e"), (6, "b")]
