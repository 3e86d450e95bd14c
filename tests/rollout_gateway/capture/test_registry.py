"""Reading runs in bounded pieces that let other tasks run, and without events of other runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from rollout_gateway.access.api_keys import Access
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.answer_ids import new_answer_id
from rollout_gateway.capture.copies import Reference
from rollout_gateway.capture.registry import Completion, Registry
from rollout_gateway.http.errors import ApiError

pytestmark = pytest.mark.anyio

TOKENS = TrajectoryTokens(b"0" * 32, "test")
CALLS, CALL_BYTES = 24, 900_000
"""A run of 21 MB: more than two pages."""


class Watched(Broker):
    """A broker that tells how much each direct get brought."""

    gets: list[int]

    async def _direct_get(self, stream: str, request: dict[str, Any]) -> tuple[list[StoredMessage], bool]:
        page, more = await super()._direct_get(stream, request)
        self.gets.append(sum(len(message.payload) for message in page))
        return page, more


def watched(broker: Broker) -> Watched:
    broker.__class__ = Watched
    out = cast(Watched, broker)
    out.gets = []
    return out


def exchange(trajectory: str, seq: int) -> ExchangeRecorded:
    return ExchangeRecorded(
        project="test",
        trajectory=trajectory,
        seq=seq,
        model="m",
        policy_version="m@0",
        step=0,
        request=b"{}",
        response=b'{"id": "r%d"}' % seq,
        prompt_ids=b"",
        sampled_ids=b"",
        logprobs=b"",
        request_hash=f"h{seq}",
    )


async def record_run(broker: Broker, name: str) -> None:
    opened = TrajectoryOpened(project="test", trajectory=name, model="m", group="g", owner="alice")
    registry = Registry(broker, "test", TOKENS)
    found = await registry.open(opened, "")

    def large(seq: int) -> list[ExchangeRecorded]:
        # No call repeats another one.
        request = msgspec.json.encode(random.Random(seq).randbytes(CALL_BYTES // 2).hex())
        return [msgspec.structs.replace(exchange(name, seq), request=request)]

    for _ in range(CALLS):
        await found.record(large)


async def test_a_run_is_read_in_pages_and_looked_at_without_reading_it(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as plain:
        await record_run(plain, "long")
    async with Broker.connect(nats_config) as plain:
        broker = watched(plain)
        registry = Registry(broker, "test", TOKENS)
        opened, completed, exchanges = await registry.describe("long")
        assert (opened.owner, completed, exchanges) == ("alice", None, CALLS)
        assert sum(broker.gets) < 10_000  # two events, and no exchange
        assert (await registry.describe("long"))[2] == CALLS

        broker.gets.clear()
        turns, done = 0, False

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.ensure_future(others())
        found = await registry.find("long")
        done = True
        await beside
        assert (found.recorded.exchanges, found.recorded.next_seq) == (CALLS, CALLS)
        assert max(broker.gets) < 11 * CALL_BYTES < sum(broker.gets)
        assert turns > CALLS / 2  # the reader gives way while it decodes, at least after every second event

        # Completed again with the same results (a client's retry), or called again: its calls are not read either.
        await registry.complete("long", Completion(reward=1.0))
        broker.gets.clear()
        await registry.complete("long", Completion(reward=1.0))
        with pytest.raises(Exception, match="is completed"):
            await registry.find("long")
        assert sum(broker.gets) < 10_000


async def test_the_answers_that_a_call_refers_to_are_read_together(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that refers to each of its earlier answers by its id refers to as many as it made calls."""
    registry = Registry(broker, "test", TOKENS)
    event = TrajectoryOpened(project="test", trajectory="t", model="m", group="g", owner="alice")
    run = await registry.open(event, "")
    names = [f"chatcmpl-{new_answer_id('t')}" for _ in range(12)]
    for name in names:
        response = msgspec.json.encode({"id": name})
        await run.record(lambda seq, r=response: [msgspec.structs.replace(exchange("t", seq), response=r)])
    read_page, pages = broker.read_page, list[int]()

    async def read_page_noted(*args: Any, **keys: Any) -> Any:
        pages.append(1)
        return await read_page(*args, **keys)

    monkeypatch.setattr(broker, "read_page", read_page_noted)
    for here in (registry, Registry(broker, "test", TOKENS)):
        pages.clear()
        found = await here.exchanges_of([*names, f"chatcmpl-{new_answer_id('t')}"], Access("alice"))
        assert {name: e.seq for name, e in found.items()} == {name: seq for seq, name in enumerate(names)}
        assert len(pages) == 1
        assert await here.exchanges_of(names, Access("bob")) == {}
        twice = [f"resp_n-{names[3]}", f"msg_0-{names[3]}"]
        assert {e.seq for e in (await here.exchanges_of(twice, Access("alice"))).values()} == {3}
        assert len(await here.exchanges_of(twice, Access("alice"))) == 2


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_a_call_that_begins_as_a_completion_wakes_is_in_the_run(broker: Broker) -> None:
    opened = TrajectoryOpened(project="test", trajectory="t", model="m", group="g")
    registry = Registry(broker, "test", TOKENS)
    found = await registry.open(opened, "")
    found.begin()
    completing = asyncio.ensure_future(registry.complete("t", Completion(reward=1.0)))
    await until(lambda: bool(found.idle._waiters))  # type: ignore[attr-defined]
    found.end()
    found.begin()  # before the completion had its turn
    for _ in range(3):
        await asyncio.sleep(0)
    await found.record(lambda seq: [exchange("t", seq)])
    found.end()
    assert (await completing).exchanges == 1


async def test_a_completion_that_fails_lets_no_call_into_another_one(broker: Broker) -> None:
    """Nor does one that is under way when its trajectory is to be forgotten."""
    registry = Registry(broker, "test", TOKENS, keep=1)
    found = await registry.open(TrajectoryOpened(project="test", trajectory="t", model="m", group="g"), "")
    async with found.lock:  # the first completion waits to read what other replicas recorded
        first = asyncio.ensure_future(registry.complete("t", Completion(reward=1.0)))
        await until(lambda: found.completing)
        wrong = Completion(exchanges=(Reference(trajectory="unknown", reply="r"),))
        with pytest.raises(ApiError, match="is unknown"):
            await registry.complete("t", wrong)
        with pytest.raises(ApiError, match="is completed"):
            found.begin()
        await registry.open(TrajectoryOpened(project="test", trajectory="u", model="m", group="g"), "")
        assert registry.get("t") is found
    assert (await first).reward == 1.0
    with pytest.raises(ApiError, match="is completed"):
        found.begin()


async def test_the_openings_of_a_keys_runs_take_bounded_memory(broker: Broker) -> None:
    """The log knows them all: runs that are never completed, with much metadata, are found there."""

    async def open_many(owner: str, runs: int) -> None:
        for number in range(runs):
            metadata = b'{"a":"%b"}' % (b"x" * 900_000)
            event = TrajectoryOpened(
                project="test", trajectory=f"{owner}{number}", model="m", group=owner, owner=owner, metadata=metadata
            )
            await registry.open(event, "")

    registry = Registry(broker, "test", TOKENS)
    await open_many("alice", 1)
    await open_many("bob", 80)
    held = [t for t in registry._known.values() if t.opened.owner == "bob"]
    assert sum(len(t.opened.metadata) for t in held) <= 64 * 1024 * 1024
    assert len(held) > 60
    assert registry.get("alice0") is not None
    assert registry.get("bob0") is None
    assert (await registry.find("bob0")).opened.owner == "bob"
    for run in [*registry._known.values()]:
        await registry.complete(run.id, Completion())
    assert not +registry._bytes
