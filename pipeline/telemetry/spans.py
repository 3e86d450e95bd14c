"""Events to OpenTelemetry spans: the one module that knows the GenAI conventions and Langfuse's attributes.

Spans are derived from events, not opened per request: requests are not slowed, and exporting history again gives
the same spans, because every id is a hash. There is one trace per trajectory: its calls, its verdicts, the training
step that used it and the loading of the resulting adapter.

Sources: OpenTelemetry GenAI semantic conventions (spans, events); Langfuse's OTLP attribute mapping; W3C trace
context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from pipeline.events import (
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    Member,
    PolicyLoaded,
    TrajectoryCompleted,
)

_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("journeyman")
RESOURCE = Resource.create({"service.name": "journeyman"})

Attributes = dict[str, str | int | float | bool]


def _hash(*parts: str, size: int) -> int:
    digest = hashlib.sha256("\x00".join(parts).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


def trace_id(project: str, trajectory: str) -> int:
    """Return the trace id (128 bits) of a trajectory whose caller sent no `traceparent`."""
    return _hash("trace", project, trajectory, size=16)


def root_span_id(project: str, trajectory: str) -> int:
    """Return the id (64 bits) of the span of the whole run."""
    return _hash("run", project, trajectory, size=8)


def traceparent(project: str, trajectory: str) -> str:
    """Return the W3C header of a trajectory's events if the caller sent none."""
    return f"00-{trace_id(project, trajectory):032x}-{root_span_id(project, trajectory):016x}-01"


class Parent(msgspec.Struct, frozen=True):
    """The trace of a trajectory and the parent of its spans."""

    trace: int
    span: int
    """Id of the caller's span above the run. 0: none."""


def parent_of(project: str, trajectory: str, headers: Mapping[str, str]) -> Parent:
    """Read it from the `traceparent` header of one of the trajectory's events."""
    match = _TRACEPARENT.match(headers.get("traceparent", ""))
    if match is None or int(match[1], 16) == 0:
        return Parent(trace_id(project, trajectory), 0)
    span = int(match[2], 16)
    return Parent(int(match[1], 16), 0 if span == root_span_id(project, trajectory) else span)


def _span(
    name: str,
    parent: Parent,
    above: int,
    own: int,
    start_us: int,
    end_us: int,
    attributes: Attributes,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    events: Sequence[SpanEvent] = (),
    failed: str = "",
) -> ReadableSpan:
    context = SpanContext(parent.trace, own, is_remote=False, trace_flags=_SAMPLED)
    above_context = SpanContext(parent.trace, above, is_remote=True, trace_flags=_SAMPLED) if above else None
    return ReadableSpan(
        name=name,
        context=context,
        parent=above_context,
        resource=RESOURCE,
        attributes=attributes,
        events=events,
        kind=kind,
        status=Status(StatusCode.ERROR, failed) if failed else Status(StatusCode.UNSET),
        start_time=(start_us or end_us) * 1000,
        end_time=end_us * 1000,
        instrumentation_scope=_SCOPE,
    )


def _common(project: str, trajectory: str, group: str, kind: str) -> Attributes:
    return {
        # Langfuse reads the session from every span, and shows the attempts at one task together.
        "langfuse.session.id": group or trajectory,
        "session.id": group or trajectory,
        "gen_ai.conversation.id": trajectory,
        "langfuse.observation.type": kind,
        "journeyman.project": project,
        "journeyman.trajectory": trajectory,
        "journeyman.group": group,
    }


def run_span(event: TrajectoryCompleted, parent: Parent) -> ReadableSpan:
    """Return the span of the whole run."""
    attributes = _common(event.project, event.trajectory, event.group, "agent") | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": event.model,
        "journeyman.outcome": event.outcome,
        "journeyman.exchanges": event.exchanges,
        "langfuse.trace.name": event.task or event.model,
        "langfuse.trace.metadata.outcome": event.outcome,
    }
    if event.reward is not None:
        attributes["journeyman.reward"] = event.reward
    own = root_span_id(event.project, event.trajectory)
    return _span(
        f"invoke_agent {event.model}", parent, parent.span, own, event.opened_at, event.at, attributes,
        failed="infrastructure failed" if event.outcome == "no_result" else "",
    )  # fmt: skip


def chat_span(event: ExchangeRecorded, parent: Parent, *, content: bool) -> ReadableSpan:
    """Return the span of one model call."""
    request = _document(event.request)
    prompt, sampled = len(event.prompt_ids) // 4, len(event.sampled_ids) // 4
    attributes = _common(event.project, event.trajectory, event.group, "generation") | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": event.model,
        "gen_ai.response.model": event.policy_version,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": sampled,
        # Sent as one object, so that Langfuse does not count the two attributes above again.
        "langfuse.observation.usage_details": msgspec.json.encode(
            {"input": prompt, "output": sampled, "total": prompt + sampled}
        ).decode(),
        "journeyman.seq": event.seq,
        "journeyman.policy_step": event.step,
    }
    for setting in ("temperature", "top_p", "max_tokens", "seed"):
        if isinstance(request.get(setting), int | float):
            attributes[f"gen_ai.request.{setting}"] = request[setting]
    if event.finish_reason:
        attributes["gen_ai.response.finish_reason"] = event.finish_reason
    if event.first_token_at:
        attributes["gen_ai.server.time_to_first_token"] = (event.first_token_at - event.started_at) / 1e6
    if content:
        attributes["langfuse.observation.input"] = msgspec.json.encode(
            request.get("messages", request)
        ).decode()
        attributes["langfuse.observation.output"] = bytes(event.response).decode("utf-8", "replace")
    own = _hash("chat", event.message_id(), size=8)
    return _span(
        f"chat {event.model}", parent, root_span_id(event.project, event.trajectory), own,
        event.started_at, event.at, attributes, kind=SpanKind.CLIENT,
        failed="" if event.status == "complete" else event.status,
    )  # fmt: skip


def verdict_span(event: GroupScored, member: Member, parent: Parent, *, content: bool) -> ReadableSpan:
    """Return the spans of the judges' scores of one trajectory."""
    results = []
    for verdict in event.verdicts:
        for score in verdict.scores:
            if score.trajectory == member.trajectory:
                said: Attributes = {
                    "gen_ai.evaluation.name": verdict.rubric or verdict.judge_model,
                    "gen_ai.evaluation.score.value": score.score,
                }
                if content and score.explanation:
                    said["gen_ai.evaluation.explanation"] = score.explanation
                results.append(SpanEvent("gen_ai.evaluation.result", said, event.at * 1000))
    attributes = _common(event.project, member.trajectory, event.group, "evaluator") | {
        "journeyman.reward": member.reward,
        "journeyman.judge": event.judge,
        "journeyman.branch": event.branch,
        "gen_ai.usage.cost": sum(v.cost_usd for v in event.verdicts),
    }
    took_us = round(sum(v.latency_s for v in event.verdicts) * 1e6)
    own = _hash("verdict", event.message_id(), member.trajectory, size=8)
    above = root_span_id(event.project, member.trajectory)
    return _span("evaluate", parent, above, own, event.at - took_us, event.at, attributes, events=results)


def step_span(event: CheckpointPublished, trajectory: str, group: str, parent: Parent) -> ReadableSpan:
    """Return the span of the optimizer step that used a trajectory."""
    facts: Attributes = {
        "journeyman.parent": event.parent,
        "journeyman.batch": event.batch_id,
        **{f"journeyman.train.{name}": value for name, value in event.metrics.items()},
    }
    return _version_span("train", "step", event, trajectory, group, parent, facts)


def load_span(event: PolicyLoaded, trajectory: str, group: str, parent: Parent) -> ReadableSpan:
    """Return the span of an inference server loading the adapter that a trajectory helped to train."""
    facts: Attributes = {"journeyman.replica": event.replica, "journeyman.probe_delta": event.probe_delta}
    return _version_span("load", "load", event, trajectory, group, parent, facts)


def _version_span(
    name: str, kind: str, event: CheckpointPublished | PolicyLoaded, trajectory: str, group: str, parent: Parent,
    facts: Attributes,
) -> ReadableSpan:  # fmt: skip
    attributes = (
        _common(event.project, trajectory, group, "span") | {"journeyman.version": event.version} | facts
    )
    own = _hash(kind, event.message_id(), trajectory, size=8)
    above = root_span_id(event.project, trajectory)
    return _span(f"{name} {event.version}", parent, above, own, event.started_at, event.at, attributes)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}
