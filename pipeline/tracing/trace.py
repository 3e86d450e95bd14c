"""Traces: their ids, and what every span of a trajectory carries.

Every id is a hash, so exporting history again gives the same spans. All spans of a trajectory are in one trace. If
the agent sent a W3C `traceparent` when the trajectory began, that is the agent's own trace, and the trajectory is
below the agent's span.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from pipeline.events import TrajectoryOpened
from pipeline.tracing.content import document

_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("journeywork")
_NAME_CHARS = 200
"""Langfuse cuts the values that it propagates at this length."""

Attributes = dict[str, Any]


def hashed(*parts: str, size: int) -> int:
    """Return an id of `size` bytes for what `parts` name, the same each time and never 0."""
    digest = hashlib.sha256("\x00".join(parts).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


def trace_id(project: str, trajectory: str) -> int:
    """Return the trace id (128 bits) of a trajectory whose caller sent no `traceparent`."""
    return hashed("trace", project, trajectory, size=16)


def root_span_id(project: str, trajectory: str) -> int:
    """Return the id (64 bits) of the span of the whole run."""
    return hashed("run", project, trajectory, size=8)


def traceparent(project: str, trajectory: str) -> str:
    """Return the W3C header of a trajectory's events if the caller sent none."""
    return f"00-{trace_id(project, trajectory):032x}-{root_span_id(project, trajectory):016x}-01"


def caller(project: str, trajectory: str, headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return trace and span of the caller, by the `traceparent` of one of the trajectory's events; None if the caller
    sent none."""
    match = _TRACEPARENT.match(headers.get("traceparent", ""))
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    trace, span = int(match[1], 16), int(match[2], 16)
    # Where the caller sent none, the gateway writes the header of `traceparent`, which names the run's own span.
    return None if span == root_span_id(project, trajectory) else (trace, span)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as its spans show it."""

    project: str
    trajectory: str
    trace: int
    above: int
    """Id of the caller's span above the run. 0: none."""
    common: Attributes
    """What every span carries: Langfuse filters by the attributes of each span, not of the trace."""

    @property
    def root(self) -> int:
        """Id (64 bits) of the span of the whole run, which is below the span `above`."""
        return root_span_id(self.project, self.trajectory)

    def attributes(self, kind: str, version: str) -> Attributes:
        """Return the attributes of a span of this run: the common ones, Langfuse's `kind` of observation, and the
        policy version, which may be empty."""
        of_version = {"langfuse.version": version} if version else {}
        return {**self.common, "langfuse.observation.type": kind, **of_version}


def deployment() -> Attributes:
    """Return the attributes of the deployment, by the variables that Langfuse's own SDKs read."""
    names = {"LANGFUSE_RELEASE": "langfuse.release", "LANGFUSE_TRACING_ENVIRONMENT": "langfuse.environment"}
    return {attribute: os.environ[name] for name, attribute in names.items() if os.environ.get(name)}


def make_run(
    project: str,
    trajectory: str,
    group: str,
    model: str,
    opened: TrajectoryOpened | None,
    context: tuple[int, int] | None,
    with_content: bool,
) -> Run:
    """Return the trajectory as its spans show it. `opened`: its opening, if the log holds it; `group` and `model` are
    used in its place. `context`: trace and span of the caller, `None` if it sent none. `with_content`: whether spans
    have the task, and of the metadata more than tags, user and session."""
    metadata = document(bytes(opened.metadata)) if opened else {}
    trace, above = context or (trace_id(project, trajectory), 0)
    task = opened.task[:_NAME_CHARS] if opened and with_content else ""
    tags = metadata.get("tags", [])
    group = opened.group if opened else group
    user, session = (str(metadata.get(name) or "")[:_NAME_CHARS] for name in ("user_id", "session_id"))
    common: Attributes = {
        f"langfuse.trace.metadata.{key}": str(value)[:_NAME_CHARS]
        for key, value in metadata.items()
        if with_content and isinstance(value, str | int | float)
    }
    common |= {
        "session.id": session or group or trajectory,
        "gen_ai.conversation.id": trajectory,
        "langfuse.trace.name": task or model,
        "langfuse.trace.tags": (
            model,
            opened.split if opened else "train",
            *(str(tag)[:_NAME_CHARS] for tag in (tags if isinstance(tags, list) else ())),
        ),
        "langfuse.trace.metadata.project": project,
        "langfuse.trace.metadata.trajectory": trajectory,
        "langfuse.trace.metadata.group": group,
        **({"user.id": user} if user else {}),
        **deployment(),
    }
    return Run(project=project, trajectory=trajectory, trace=trace, above=above, common=common)


@cache
def resource() -> Resource:
    """Return the resource of every span; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have precedence."""
    return Resource({"service.name": "journeywork"}).merge(OTELResourceDetector().detect())


def link(trace: int, span: int) -> Link:
    """Return a link to the caller's own span of a call, which is not above the call's span in the tree."""
    return Link(SpanContext(trace, span, is_remote=True, trace_flags=_SAMPLED))


def span(
    name: str,
    trace: int,
    above: int,
    span_id: int,
    start_us: int,
    end_us: int,
    attributes: Attributes,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    events: Sequence[SpanEvent] = (),
    links: Sequence[Link] = (),
    failed: str = "",
) -> ReadableSpan:
    """Return a finished span with the id `span_id` in a trace. `above`: the id of its parent, 0 for none. Times are in
    microseconds; a start of 0 stands for the end. `failed`: why it failed, empty if it did not."""
    if failed:
        attributes = attributes | {"error.type": failed}
    return ReadableSpan(
        name=name,
        context=SpanContext(trace, span_id, is_remote=False, trace_flags=_SAMPLED),
        parent=SpanContext(trace, above, is_remote=True, trace_flags=_SAMPLED) if above else None,
        resource=resource(),
        attributes=attributes,
        events=events,
        links=links,
        kind=kind,
        status=Status(StatusCode.ERROR, failed) if failed else Status(StatusCode.UNSET),
        start_time=(start_us or end_us) * 1000,
        end_time=end_us * 1000,
        instrumentation_scope=_SCOPE,
    )
