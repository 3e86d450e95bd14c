"""The life of two trajectories on the log, from first call to verdict."""

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from pipeline.config import Config, NatsConfig, TelemetryConfig
from pipeline.events import ExchangeRecorded, GroupScored, Member, Score, Verdict
from pipeline.log.broker import Broker
from pipeline.tracing import exporter, trace
from tests.kits import events
from tests.kits.langfuse import PUBLIC, SECRET, LangfuseReceiver
from tests.kits.waiting import until_true

START = 1_700_000_000_000_000
AGENTS_TRACE, AGENTS_SPAN = "ab" * 16, "cd" * 8
OWN = {"traceparent": f"00-{AGENTS_TRACE}-{AGENTS_SPAN}-01"}
METADATA = {"user_id": "u-7", "session_id": "ticket-12", "tags": ["vip"], "contact": "ann@example.com"}


def point_at(monkeypatch: pytest.MonkeyPatch, receiver: LangfuseReceiver) -> None:
    monkeypatch.setenv("LANGFUSE_BASE_URL", receiver.url)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC)
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET)


def exchange(trajectory: str, seq: int, asked: str) -> ExchangeRecorded:
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    request = {"model": "m", "temperature": 0.5, "tools": tools, "messages": [{"role": "user", "content": asked}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": "Ann."}}
    response, start = {"id": f"cmpl-{seq}", "choices": [choice]}, START + 10_000_000 * seq
    bodies = {"request": json.dumps(request).encode(), "response": json.dumps(response).encode()}
    times = {"started_at": start, "first_token_at": start + 5, "at": start + 2_000_000}
    return events.exchange(trajectory, seq, group="g", finish_reason="stop", **bodies, **times)


def calls(trajectory: str) -> list[ExchangeRecorded]:
    """Two turns."""
    return [exchange(trajectory, seq, "Who is ann@example.com?") for seq in (0, 1)]


async def publish_lives(broker: Broker) -> None:
    """`t1` has no trace of its own; `t2` was opened below a span of its agent."""
    task = "find ann@example.com"
    for trajectory, headers in (("t1", {"traceparent": trace.traceparent("p", "t1")}), ("t2", OWN)):
        await broker.publish(
            events.opened(trajectory, task=task, metadata=json.dumps(METADATA).encode(), at=START), headers
        )
        for call in calls(trajectory):
            # Each call of an instrumented agent has a span of its own.
            own = f"00-{AGENTS_TRACE}-{call.seq + 1:016x}-01" if trajectory == "t2" else headers["traceparent"]
            await broker.publish(call, {"traceparent": own})
        ended = {"reward": 1.0, "exchanges": 2, "prompt_tokens": 4, "sampled_tokens": 2}
        times = {"opened_at": START, "at": START + 30_000_000}
        await broker.publish(events.completed(trajectory, task=task, **ended, **times), headers)
    members = tuple(Member(trajectory=t, reward=r, components={"style": r / 2}) for t, r in (("t1", 1.0), ("t2", 0.0)))
    verdict = Verdict(
        judge_model="openai/gpt-5-mini",
        rubric="default",
        rubric_hash="rh",
        prompt_tokens=101,
        completion_tokens=20,
        cost_usd=0.5,
        latency_s=1.0,
        scores=tuple(
            Score(trajectory=m.trajectory, score=m.reward, explanation="it wrote to ann@example.com") for m in members
        ),
    )
    await broker.publish(
        GroupScored(
            project="p", group="g", model="m", judge="h", members=members, verdicts=(verdict,), at=START + 40_000_000
        )
    )


SPANS = 2 * (1 + 2 + 1)
"""Spans of the two lives: run, calls and verdict of each."""


async def run_until(config: NatsConfig, done: Callable[[], bool], **settings: Any) -> None:
    """Run the telemetry service until `done`."""
    telemetry = TelemetryConfig(**settings)
    async with anyio.create_task_group() as tg:
        tg.start_soon(exporter.serve, Config(project="p", nats=config, telemetry=telemetry), lambda **_: None)
        await until_true(done)
        tg.cancel_scope.cancel()
