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


@pytest.mark.parametrize("kept", [True, False], ids=["sends the empty message back", "leaves it out"])
async def test_a_run_goes_on_after_an_empty_answer(nats_config: NatsConfig, kept: bool) -> None:
    """The AI SDK leaves an empty message of the assistant out of the history, other clients send it back."""
    first: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    second = [*first, *([said] if kept else []), {"role": "user", "content": "more"}]

    def call(messages: list[dict[str, Any]]) -> Any:
        return CHAT.read(msgspec.json.encode({"model": "m", "messages": messages}))

    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TrajectoryTokens(b"0" * 32, "test"))
        config = GatewayConfig(detection=DetectionConfig(enabled=True))
        detector = TrajectoryDetector("test", registry, config)
        detector._ready.set()
        run = await detector.find(call(first), "m", "alice")
        sampled = SampledChoice(0)
        sampled.fields["message"] = msgspec.Raw(msgspec.json.encode(said))
        detector.answered(run, call(first), Answer({}, b"", [sampled]))
        assert (await detector.find(call(second), "m", "alice")) is run
