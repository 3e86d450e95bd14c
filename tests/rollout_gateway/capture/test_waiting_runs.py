"""Detected runs that wait, on a real log."""

from typing import Any

import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from rollout_gateway.capture.conversations import Quote
from rollout_gateway.capture.waiting_runs import WaitingRun, WaitingRuns


async def test_a_run_is_taken_once_although_its_acknowledgement_was_lost(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway takes the run before the publish is repeated: the repetition must not put it there again."""
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config) as elsewhere:
        runs, others = WaitingRuns(broker, "test", 60, 60), WaitingRuns(elsewhere, "test", 60, 60)
        publish, taken = broker.client.publish_acked, []

        async def take() -> WaitingRun | None:
            waiting = await others.find("history.*")
            return waiting if waiting is not None and await others.take(waiting) else None

        async def lose_the_first(*args: Any) -> Ack:
            ack = await publish(*args)
            if not taken:
                taken.append(await take())
                raise nats.errors.TimeoutError
            return ack

        monkeypatch.setattr(broker.client, "publish_acked", lose_the_first)
        await runs.put(WaitingRun("run", "history", 1))
        assert [run and run.run for run in taken] == ["run"]
        assert await take() is None
        await runs.put(WaitingRun("run", "history", 1))
        assert await take() is not None


async def test_a_run_that_said_the_same_often_is_found_where_it_waits(broker: Broker) -> None:
    runs = WaitingRuns(broker, "test", 600, 600)
    quote = Quote("history", "fingerprint", [], (), [])
    calls = 40
    for call in range(calls):
        if (before := await runs.find("*.run")) is not None:
            assert await runs.take(before)
        await runs.put(WaitingRun("run", f"history-{call}", call), [quote])
        await runs.put(WaitingRun(f"gone-{call}", "history", 1), [quote])
        gone = await runs.find(f"history.gone-{call}")
        assert gone is not None
        assert await runs.take(gone)
    found = await runs.find_quoted("fingerprint")
    assert [waiting.calls for _, waiting, newest in found if newest] == [calls - 1]
    assert {waiting.run for _, waiting, _ in found} == {"run"}


async def test_what_too_many_runs_said_tells_none_of_them(broker: Broker) -> None:
    runs = WaitingRuns(broker, "test", 600, 600)
    quote = Quote("history", "fingerprint", [], (), [])
    for number in range(32):
        await runs.put(WaitingRun(f"run-{number}", f"history-{number}", 1), [quote])
    found = await runs.find_quoted("fingerprint")
    assert [waiting.run for _, waiting, _ in found] == [f"run-{number}" for number in range(32)]
    await runs.put(WaitingRun("one-more", "history", 1), [quote])
    assert await runs.find_quoted("fingerprint") == []
