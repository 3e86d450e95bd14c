"""Detected runs belong to the key whose calls began them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pipeline.config import DetectionConfig, GatewayConfig, NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.registry import Registry
from rollout_gateway.dialects.calls import Answer, SampledChoice
from rollout_gateway.dialects.endpoints import CHAT

pytestmark = pytest.mark.anyio


async def test_a_run_goes_on_with_calls_of_its_own_key_only(nats_config: NatsConfig) -> None:
    first = [{"role": "user", "content": "hello"}]
    said = {"role": "assistant", "content": "hi"}
    second = [*first, said, {"role": "user", "content": "more"}]

    def call(messages: list[dict[str, str]]) -> Any:
        return CHAT.read(msgspec.json.encode({"model": "m", "messages": messages}))

    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TrajectoryTokens(b"0" * 32, "test"))
        detector = TrajectoryDetector(
            "test", registry, GatewayConfig(detection=DetectionConfig(enabled=True))
        )
        detector._ready.set()
        runs = {}
        for owner in ("alice", "bob"):
            runs[owner] = await detector.find(call(first), "m", owner)
            sampled = SampledChoice(0)
            sampled.fields["message"] = msgspec.Raw(msgspec.json.encode(said))
            detector.answered(runs[owner], call(first), Answer({}, b"", [sampled]))
        assert [(run.opened.owner, run.id) for run in runs.values()] == [(o, r.id) for o, r in runs.items()]
        assert runs["alice"].id != runs["bob"].id
        for owner in ("bob", "alice"):
            assert (await detector.find(call(second), "m", owner)) is runs[owner]
        assert (await detector.find(call(second), "m", "carol")).id not in {r.id for r in runs.values()}
