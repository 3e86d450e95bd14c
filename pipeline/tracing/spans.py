"""Events to OpenTelemetry spans: the one module that knows the GenAI conventions and Langfuse's attributes.

`exporter` calls it with each event. A `Run` (`pipeline.tracing.trace`) is the event's trajectory; `with_content` says
whether prompts, replies and explanations are part of the spans.

Spans are derived from events, not opened per request, so requests are not slowed. The whole tree is in
docs/dashboard.md, which a test compares with what a receiver gets.

Sources: OpenTelemetry GenAI semantic conventions (spans, events); Langfuse's OTLP attribute mapping; W3C trace
context.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from pipeline.events import ExchangeRecorded, GroupScored, Member, TrajectoryCompleted
from pipeline.names import is_outside, version_name
from pipeline.tracing.content import Json, as_json, document, reply, request_input
from pipeline.tracing.trace import Attributes, Run, hashed, link, span

_NUMBERS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
_METADATA = "langfuse.observation.metadata."


def run_span(event: TrajectoryCompleted, run: Run, last: ExchangeRecorded | None, with_content: bool) -> ReadableSpan:
    """Return the span of the whole run. `last` is its last call, whose reply is the run's output; `with_content`:
    whether task and reply are part of it."""
    attributes = run.attributes("agent", version_name(event.model, event.last_step)) | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "journeywork",
        "gen_ai.agent.name": event.model,
        "langfuse.trace.metadata.outcome": event.outcome,
        f"{_METADATA}calls": event.exchanges,
        f"{_METADATA}prompt_tokens": event.prompt_tokens,
        f"{_METADATA}sampled_tokens": event.sampled_tokens,
    }
    if event.reward is not None:
        attributes[f"{_METADATA}reward"] = event.reward
    if with_content and event.task:
        attributes["langfuse.observation.input"] = event.task
    if with_content and last is not None:
        attributes["langfuse.observation.output"] = as_json(reply(document(last.response)))
    return span(
        f"invoke_agent {event.model}",
        run.trace,
        run.above,
        run.root,
        event.opened_at,
        event.at,
        attributes,
        failed="infrastructure failed" if event.outcome == "no_result" else "",
    )


def call_span(event: ExchangeRecorded, run: Run, with_content: bool, called_by: tuple[int, int] | None) -> ReadableSpan:
    """Return the span of one model call. `with_content`: whether prompt and reply are part of it. `called_by`: trace
    and span of the agent's own span of this call."""
    request, response = document(event.request), document(event.response)
    # A provider's count, else the number of packed ids of four bytes each.
    prompt = event.input_tokens or len(event.prompt_ids) // 4
    sampled = event.output_tokens or len(event.sampled_ids) // 4
    usage = {"input": prompt, "output": sampled, "total": prompt + sampled}
    operation = "text_completion" if event.endpoint == "/v1/completions" else "chat"
    attributes = run.attributes("generation", event.policy_version) | {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "outside" if is_outside(event.policy_version) else "vllm",
        "gen_ai.request.model": event.model,
        "gen_ai.response.model": event.policy_version,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": sampled,
        # Sent as one object, so that Langfuse does not count the two attributes above again.
        "langfuse.observation.usage_details": msgspec.json.encode(usage).decode(),
        f"{_METADATA}seq": event.seq,
        **_parameters(request),
    }
    if event.cost_usd is not None:
        attributes["langfuse.observation.cost_details"] = msgspec.json.encode({"total": event.cost_usd}).decode()
    if event.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (event.finish_reason,)
    if isinstance(response.get("id"), str):
        attributes["gen_ai.response.id"] = response["id"]
    if event.first_token_at:
        began = datetime.fromtimestamp(event.first_token_at / 1e6, UTC)
        attributes["langfuse.observation.completion_start_time"] = began.isoformat().replace("+00:00", "Z")
    if with_content:
        attributes["langfuse.observation.input"] = as_json(request_input(request))
        attributes["langfuse.observation.output"] = as_json(reply(response))
        if isinstance(request.get("tools"), list):
            attributes["gen_ai.tool.definitions"] = as_json(request["tools"])
    return span(
        f"{operation} {event.model}",
        run.trace,
        run.root,
        hashed("chat", event.message_id(), size=8),
        event.started_at,
        event.at,
        attributes,
        kind=SpanKind.CLIENT,
        links=[link(*called_by)] if called_by and called_by != (run.trace, run.above) else (),
        failed="" if event.status == "complete" else event.status,
    )


def _parameters(request: Json) -> Attributes:
    """Return the numbers among the settings of a call, by the conventions' names."""
    return {
        f"gen_ai.request.{name}": request[name]
        for name in _NUMBERS
        if isinstance(request.get(name), int | float) and not isinstance(request[name], bool)
    }


def verdict_span_id(event: GroupScored, trajectory: str) -> int:
    """Return the id of the span of a trajectory's verdicts."""
    return hashed("verdict", event.message_id(), trajectory, size=8)


def verdict_span(event: GroupScored, member: Member, run: Run, with_content: bool) -> ReadableSpan:
    """Return the span of the verdicts on one trajectory of a scored group, the `member`, with an event for each score.
    `with_content`: whether explanations are part of it."""
    results = []
    for verdict in event.verdicts:
        for score in verdict.scores:
            if score.trajectory == member.trajectory:
                result: Attributes = {
                    "gen_ai.evaluation.name": verdict.rubric or verdict.judge_model,
                    "gen_ai.evaluation.score.value": score.score,
                }
                if score.call >= 0:
                    result[f"{_METADATA}call"] = score.call
                if with_content and score.explanation:
                    result["gen_ai.evaluation.explanation"] = score.explanation
                results.append(SpanEvent("gen_ai.evaluation.result", result, event.at * 1000))
    attributes = run.attributes("evaluator", version_name(event.model, member.last_step)) | {
        f"{_METADATA}reward": member.reward,
        f"{_METADATA}judge": event.judge,
        f"{_METADATA}branch": event.branch,
        **{f"{_METADATA}reward.{name}": value for name, value in member.components.items()},
    }
    took_us = round(sum(v.latency_s for v in event.verdicts) * 1e6)
    return span(
        "evaluate",
        run.trace,
        run.root,
        verdict_span_id(event, member.trajectory),
        event.at - took_us,
        event.at,
        attributes,
        events=results,
    )
