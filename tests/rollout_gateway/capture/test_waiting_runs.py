"""Detected runs that wait, on a real log."""

from __future__ import annotations

from typing import Any

import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from rollout_gateway.capture.waiting_runs import WaitingRun, WaitingRuns

pytestmark = pytest.mark.anyio


async def test_a_run_is_taken_once_although_its_acknowledgement_was_lost(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway takes the run before the publish is repeated: the repetition must not put it there again."""
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config) as elsewhere:
        runs, others = WaitingRuns(broker, "test", 60, 60), WaitingRuns(elsewhere, "test", 60, 60)
        publish, taken = broker.client.publish_acked, []

        async def take() -> WaitingRun | None:
            waiting = await others.find("history")
            return waiting if waiting is not None and await others.claim(waiting) else None

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
