"""Events to OpenTelemetry spans: the one module that knows the GenAI conventions and Langfuse's attributes.

Spans are derived from events, not opened per request, so requests are not slowed. The whole tree is in
docs/tracing.md, which a test compares with what a receiver gets.

Sources: OpenTelemetry GenAI semantic conventions (spans, events); Langfuse's OTLP attribute mapping; W3C trace
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from pipeline.events import (
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    Member,
    PolicyLoaded,
    TrajectoryCompleted,
    Verdict,
)
from pipeline.names import version_name
from pipeline.telemetry.content import (
    Content,
    Json,
    answered_tools,
    conversation,
    document,
    messages,
    reply,
    request_input,
)
from pipeline.telemetry.trace import Attributes, Run, deployment, hashed, link, span

_NUMBERS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


def run_span(
    event: TrajectoryCompleted, run: Run, last: ExchangeRecorded | None, content: Content
) -> ReadableSpan:
    """Return the span of the whole run. `last` is its last call, whose reply is the run's output."""
    version = version_name(event.model, event.last_step)
    attributes = run.attributes("agent", version) | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "journeywork",
        "gen_ai.agent.name": event.model,
        "langfuse.trace.metadata.outcome": event.outcome,
        "langfuse.observation.metadata.trajectory": event.trajectory,
        "langfuse.observation.metadata.calls": event.exchanges,
        "langfuse.observation.metadata.prompt_tokens": event.prompt_tokens,
        "langfuse.observation.metadata.sampled_tokens": event.sampled_tokens,
    }
    if event.reward is not None:
        attributes["langfuse.observation.metadata.reward"] = event.reward
    if content.shown and event.task:
        attributes["langfuse.observation.input"] = content.text(event.task)
    if content.shown and last is not None:
        attributes["langfuse.observation.output"] = content.json(reply(document(last.response)))
    return span(
        f"invoke_agent {event.model}", run.trace, run.above, run.root, event.opened_at, event.at, attributes,
        failed="infrastructure failed" if event.outcome == "no_result" else "",
    )  # fmt: skip


def call_spans(
    event: ExchangeRecorded, run: Run, content: Content, since_us: int, called_by: tuple[int, int] | None
) -> list[ReadableSpan]:
    """Return the span of one model call, and those of the tools whose results it brings. The tools ran after
    `since_us`, the end of the call before (0: not known). `called_by` is the agent's own span of this call."""
    request = document(event.request)
    return [
        *_tool_spans(event, request, run, content, since_us),
        _chat_span(event, request, run, content, called_by),
    ]


def _chat_span(
    event: ExchangeRecorded, request: Json, run: Run, content: Content, called_by: tuple[int, int] | None
) -> ReadableSpan:
    response = document(event.response)
    prompt, sampled = len(event.prompt_ids) // 4, len(event.sampled_ids) // 4
    operation = "text_completion" if event.endpoint == "/v1/completions" else "chat"
    attributes = run.attributes("generation", event.policy_version) | {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": event.model,
        "gen_ai.response.model": event.policy_version,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": sampled,
        # Sent as one object, so that Langfuse does not count the two attributes above again.
        "langfuse.observation.usage_details": _usage(prompt, sampled),
        "langfuse.observation.metadata.seq": event.seq,
        "langfuse.observation.metadata.policy_step": event.step,
        **_parameters(request),
    }
    if event.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (event.finish_reason,)
    if isinstance(response.get("id"), str):
        attributes["gen_ai.response.id"] = response["id"]
    if event.first_token_at:
        began = datetime.fromtimestamp(event.first_token_at / 1e6, UTC)
        attributes["langfuse.observation.completion_start_time"] = began.isoformat().replace("+00:00", "Z")
    if run.prompt is not None:
        attributes["langfuse.observation.prompt.name"], attributes["langfuse.observation.prompt.version"] = (
            run.prompt
        )
    if content.shown:
        attributes |= _said(request, response, event.finish_reason, content)
    return span(
        f"{operation} {event.model}", run.trace, run.root, hashed("chat", event.message_id(), size=8),
        event.started_at, event.at, attributes, kind=SpanKind.CLIENT,
        links=[link(*called_by)] if called_by and called_by != (run.trace, run.above) else (),
        failed="" if event.status == "complete" else event.status,
    )  # fmt: skip


def _usage(prompt: int, sampled: int) -> str:
    return msgspec.json.encode({"input": prompt, "output": sampled, "total": prompt + sampled}).decode()


def _parameters(request: Json) -> Attributes:
    """Return the settings of a call, by the conventions' names."""
    attributes: Attributes = {
        f"gen_ai.request.{name}": request[name]
        for name in _NUMBERS
        if isinstance(request.get(name), int | float) and not isinstance(request[name], bool)
    }
    stop = request.get("stop")
    if isinstance(stop, str):
        stop = [stop]
    if isinstance(stop, list) and stop:
        attributes["gen_ai.request.stop_sequences"] = tuple(str(s) for s in stop)
    if isinstance(request.get("n"), int) and request["n"] > 1:
        attributes["gen_ai.request.choice.count"] = request["n"]
    if request.get("stream") is True:
        attributes["gen_ai.request.stream"] = True
    return attributes


def _said(request: Json, response: Json, finish_reason: str, content: Content) -> Attributes:
    asked, answer = request_input(request), reply(response)
    said = [{**m, "finish_reason": finish_reason} for m in messages([answer] if answer else [])]
    attributes: Attributes = {
        "langfuse.observation.input": content.json(asked),
        "langfuse.observation.output": content.json(answer or response),
        "gen_ai.input.messages": content.json(messages(conversation(request))),
        "gen_ai.output.messages": content.json(said),
    }
    if isinstance(request.get("tools"), list):
        attributes["gen_ai.tool.definitions"] = content.json(request["tools"])
    return attributes


def _tool_spans(
    event: ExchangeRecorded, request: Json, run: Run, content: Content, since_us: int
) -> list[ReadableSpan]:
    """The log holds when a tool's result came back to the model, not when the tool itself began and ended: a span lasts
    from the reply that called the tool to the call that brought its result."""
    if event.choice:
        return []  # the other choices of a call have the same request
    out = []
    for call, result in answered_tools(request):
        function = call.get("function") or {}
        name, call_id = str(function.get("name", "")), str(call.get("id", ""))
        attributes = run.attributes("tool", event.policy_version) | {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call_id,
        }
        if content.shown:
            arguments = content.text(str(function.get("arguments", "")))
            returned = content.json(result)
            attributes |= {
                "gen_ai.tool.call.arguments": arguments,
                "gen_ai.tool.call.result": returned,
                "langfuse.observation.input": arguments,
                "langfuse.observation.output": returned,
            }
        own = hashed("tool", event.message_id(), call_id, size=8)
        end = event.started_at or event.at
        out.append(
            span(f"execute_tool {name}", run.trace, run.root, own, min(since_us or end, end), end, attributes)
        )
    return out


def verdict_span_id(event: GroupScored, trajectory: str) -> int:
    """Return the id of the span of a trajectory's verdicts."""
    return hashed("verdict", event.message_id(), trajectory, size=8)


def verdict_spans(event: GroupScored, member: Member, run: Run, content: Content) -> list[ReadableSpan]:
    """Return the span of the verdicts on one trajectory, and below it one for each pass of a judge model.

    A pass reads the whole group: its tokens and cost are divided among the members, so that sums over traces hold."""
    results, passes = [], []
    above = verdict_span_id(event, member.trajectory)
    position = [m.trajectory for m in event.members].index(member.trajectory)
    version = version_name(event.model, member.last_step)
    for number, verdict in enumerate(event.verdicts):
        for score in verdict.scores:
            if score.trajectory == member.trajectory:
                said: Attributes = {
                    "gen_ai.evaluation.name": verdict.rubric or verdict.judge_model,
                    "gen_ai.evaluation.score.value": score.score,
                }
                if content.shown and score.explanation:
                    said["gen_ai.evaluation.explanation"] = content.text(score.explanation)
                results.append(SpanEvent("gen_ai.evaluation.result", said, event.at * 1000))
                if verdict.prompt_tokens:
                    passes.append(_pass_span(event, verdict, number, position, run, above, version, said))
    attributes = run.attributes("evaluator", version) | {
        "langfuse.observation.metadata.reward": member.reward,
        "langfuse.observation.metadata.judge": event.judge,
        "langfuse.observation.metadata.branch": event.branch,
        **{
            f"langfuse.observation.metadata.reward.{name}": value for name, value in member.components.items()
        },
    }
    took_us = round(sum(v.latency_s for v in event.verdicts) * 1e6)
    evaluated = span(
        "evaluate", run.trace, run.root, above, event.at - took_us, event.at, attributes, events=results
    )
    return [evaluated, *passes]


def _pass_span(
    event: GroupScored, verdict: Verdict, number: int, position: int, run: Run, above: int, version: str,
    said: Attributes,
) -> ReadableSpan:  # fmt: skip
    count = len(event.members)
    prompt, sampled = (
        n // count + (position < n % count) for n in (verdict.prompt_tokens, verdict.completion_tokens)
    )
    attributes = run.attributes("generation", version) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": verdict.judge_model.partition("/")[0] or "litellm",
        "gen_ai.request.model": verdict.judge_model,
        "gen_ai.response.model": verdict.judge_model,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": sampled,
        "langfuse.observation.usage_details": _usage(prompt, sampled),
        "langfuse.observation.cost_details": msgspec.json.encode(
            {"total": verdict.cost_usd / count}
        ).decode(),
        "langfuse.observation.metadata.rubric": verdict.rubric,
        "langfuse.observation.metadata.rubric_hash": verdict.rubric_hash,
    }
    if explanation := said.get("gen_ai.evaluation.explanation"):
        answer = {"score": said["gen_ai.evaluation.score.value"], "explanation": explanation}
        attributes["langfuse.observation.output"] = msgspec.json.encode(answer).decode()
    own = hashed("pass", event.message_id(), run.trajectory, str(number), size=8)
    start = event.at - round(verdict.latency_s * 1e6)
    name = f"chat {verdict.judge_model}"
    return span(name, run.trace, above, own, start, event.at, attributes, kind=SpanKind.CLIENT)


def _step_ids(event: CheckpointPublished) -> tuple[int, int]:
    identity = (event.project, event.model, event.branch, event.version)
    return hashed("step trace", *identity, size=16), hashed("step", *identity, size=8)


def step_spans(event: CheckpointPublished, learned_from: Sequence[Run]) -> list[ReadableSpan]:
    """Return the span of an optimizer step, with a link to every trajectory that it used, and one in the trace of each
    of these trajectories, with a link to the step."""
    trace, own = _step_ids(event)
    facts: Attributes = {
        "langfuse.observation.metadata.parent": event.parent,
        "langfuse.observation.metadata.batch": event.batch_id,
        "langfuse.observation.metadata.branch": event.branch,
    }
    metrics: Attributes = {f"langfuse.observation.metadata.{k}": v for k, v in event.metrics.items()}
    attributes = _training(event, "span") | facts | metrics
    name = f"train {event.version}"
    step = span(
        name, trace, 0, own, event.started_at, event.at, attributes,
        links=[link(run.trace, run.root) for run in learned_from],
    )  # fmt: skip
    below = [
        span(
            name, run.trace, run.root, hashed("step", event.message_id(), run.trajectory, size=8),
            event.started_at, event.at, run.attributes("span", event.version) | facts, links=[link(trace, own)],
        )
        for run in learned_from
    ]  # fmt: skip
    return [step, *below]


def load_spans(
    event: PolicyLoaded, step: CheckpointPublished, learned_from: Sequence[Run]
) -> list[ReadableSpan]:
    """Return the span of an inference server that loads an adapter, below the step that made it, and one in the trace
    of each trajectory that it learned from."""
    trace, above = _step_ids(step)
    facts: Attributes = {
        "langfuse.observation.metadata.replica": event.replica,
        "langfuse.observation.metadata.probe_delta": event.probe_delta,
    }
    places: list[tuple[int, int, str, Any]] = [(trace, above, "", _training(step, "span"))]
    places += [(r.trace, r.root, r.trajectory, r.attributes("span", event.version)) for r in learned_from]
    return [
        span(
            f"load {event.version}", of, parent, hashed("load", event.message_id(), trajectory, size=8),
            event.started_at, event.at, attributes | facts,
        )
        for of, parent, trajectory, attributes in places
    ]  # fmt: skip


def _training(event: CheckpointPublished, kind: str) -> Attributes:
    return {
        "langfuse.observation.type": kind,
        "langfuse.version": event.version,
        "langfuse.trace.name": f"train {event.version}",
        "langfuse.trace.tags": (event.model, "training"),
        "langfuse.trace.metadata.project": event.project,
    } | deployment()
