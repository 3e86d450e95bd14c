"""Reading runs in bounded pieces that let other tasks run, and without events of other runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.copies import Reference
from rollout_gateway.capture.registry import Completion, Registry
from rollout_gateway.http.errors import ApiError
from tests.kits import events

pytestmark = pytest.mark.anyio

TOKENS = TrajectoryTokens(b"0" * 32, "test")
CALLS, CALL_BYTES = 24, 900_000
"""A run of 21 MB: more than two pages."""


def exchange(trajectory: str, seq: int) -> ExchangeRecorded:
    response = b'{"id": "r%d"}' % seq
    return events.exchange(trajectory, seq, project="test", response=response, request_hash=f"h{seq}")


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
