"""Runs in memory: completed once and with all their calls, here and by other gateways, in bounded memory."""

import asyncio

import anyio
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.capture import registry as registry_module
from rollout_gateway.capture.copies import Reference
from rollout_gateway.capture.registry import Completion
from rollout_gateway.http.errors import ApiError
from tests.kits.events import exchange, opened
from tests.kits.waiting import until_true
from tests.rollout_gateway.kit import registry_of


async def test_a_call_that_begins_as_a_completion_wakes_is_in_the_run(broker: Broker) -> None:
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    found.begin()
    completing = asyncio.ensure_future(registry.complete("t", Completion(reward=1.0)))
    await until_true(lambda: bool(found.idle._waiters))  # type: ignore[attr-defined]
    found.end()
    found.begin()  # before the completion had its turn
    for _ in range(3):
        await asyncio.sleep(0)
    await found.record([exchange("t")])
    found.end()
    assert (await completing).exchanges == 1


async def test_a_completion_that_fails_lets_no_call_into_another_one(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is under way when its trajectory is to be forgotten."""
    monkeypatch.setattr(registry_module, "_OWNER_BYTES", 2000)
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    async with found.lock:  # the first completion waits to read what other replicas recorded
        first = asyncio.ensure_future(registry.complete("t", Completion(reward=1.0)))
        await until_true(lambda: found.completing)
        wrong = Completion(exchanges=(Reference(trajectory="unknown", reply="r"),))
        with pytest.raises(ApiError, match="is unknown"):
            await registry.complete("t", wrong)
        with pytest.raises(ApiError, match="is completed"):
            found.begin()
        await registry.open(opened("u"), "")
        assert registry.get("t") is found
    assert (await first).reward == 1.0
    with pytest.raises(ApiError, match="is completed"):
        found.begin()


async def test_a_completion_elsewhere_is_heeded_though_it_came_while_this_replica_was_away(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as one, Broker.connect(nats_config) as two:
        here, there = registry_of(one), registry_of(two)
        await here.note_log_end()
        await there.open(opened("t"), "")
        found = await here.find("t")
        await there.complete("t", Completion(reward=1.0))
        assert here.get("t") is found, "nothing was followed yet"
        async with anyio.create_task_group() as tg:
            tg.start_soon(here.follow_completions)
            await until_true(lambda: here.get("t") is None)
            tg.cancel_scope.cancel()
        assert found.completing


async def test_the_openings_of_a_keys_runs_take_bounded_memory(broker: Broker) -> None:
    """The log knows them all: runs that are never completed, with much metadata, are found there."""

    async def open_many(owner: str, runs: int) -> None:
        metadata = b'{"a":"%b"}' % (b"x" * 900_000)
        for number in range(runs):
            await registry.open(opened(f"{owner}{number}", group=owner, owner=owner, metadata=metadata), "")

    registry = registry_of(broker)
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


async def test_a_run_that_was_opened_while_it_was_looked_up_is_in_memory_once(broker: Broker) -> None:
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    held = dict(registry._bytes)
    assert await registry._load("t") is found
    assert registry._bytes == held
