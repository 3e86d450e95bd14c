"""The service that turns the log into traces: reads events, makes spans (`pipeline.tracing.spans`) and Langfuse
scores, and exports them over HTTP.

It has its own durable consumers: no service waits for the trace backend, and events stay on the log until the
backend has their spans (`pipeline.tracing.backend`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import anyio
from opentelemetry.sdk.trace import ReadableSpan

from pipeline.config import Config
from pipeline.events import AnyEvent, ExchangeRecorded, GroupScored, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker, Consumption, LogEntry
from pipeline.running.service import Ready, main
from pipeline.tracing import langfuse, spans
from pipeline.tracing.backend import TraceBackend, send, split_into_requests
from pipeline.tracing.trace import Run, caller, make_run

BATCH = 512
"""Events whose spans are made and sent together."""
_REMEMBERED = 10_000
"""Trajectories whose `Run` is remembered."""


class SpanMaker:
    """Makes the spans and the scores of an event. What they say of its trajectory is read from the log once for many
    events."""

    def __init__(self, broker: Broker, with_content: bool) -> None:
        """`with_content`: whether prompts, replies and explanations are part of the spans (`telemetry.content`)."""
        self._broker, self._with_content = broker, with_content
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()
        """What is common to the spans of a trajectory, by project and trajectory. Of more than `_REMEMBERED`, the one
        that was not used for the longest time is forgotten."""

    async def make(self, recorded: LogEntry[AnyEvent]) -> tuple[list[ReadableSpan], list[langfuse.Score]]:
        """Return the spans and the scores of an event; none for an event that traces do not show."""
        event, with_content = recorded.event, self._with_content
        match event:
            case ExchangeRecorded():
                run = await self._run(event.project, event.trajectory, event.group, event.model, recorded)
                called_by = caller(event.project, event.trajectory, recorded.headers)
                return [spans.call_span(event, run, with_content, called_by)], []
            case TrajectoryCompleted():
                keys = {"project": event.project, "trajectory": event.trajectory}
                run = await self._run(event.project, event.trajectory, event.group, event.model)
                last = await self._broker.read_last(ExchangeRecorded, **keys) if with_content else None
                return [spans.run_span(event, run, last.event if last else None, with_content)], []
            case GroupScored():
                verdict_spans: list[ReadableSpan] = []
                scores: list[langfuse.Score] = []
                for member in event.members:
                    run = await self._run(event.project, member.trajectory, event.group, event.model)
                    verdict_spans.append(spans.verdict_span(event, member, run, with_content))
                    scores += langfuse.scores(event, member, run, with_content)
                return verdict_spans, scores
            case _:
                return [], []

    async def _run(
        self, project: str, trajectory: str, group: str, model: str, call: LogEntry[AnyEvent] | None = None
    ) -> Run:
        """Return a trajectory as its spans show it. `group` and `model`: of the event, for a trajectory whose opening
        has left the log. `call`: one of its calls, if the caller has one, which may save a read of the first."""
        key = (project, trajectory)
        if key not in self._runs:
            opened = await self._broker.read_last(TrajectoryOpened, project=project, trajectory=trajectory)
            context = caller(project, trajectory, opened.headers) if opened else None
            context = context or caller(project, trajectory, await self._first_headers(project, trajectory, call))
            event = opened.event if opened else None
            self._runs[key] = make_run(project, trajectory, group, model, event, context, self._with_content)
            if len(self._runs) > _REMEMBERED:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return self._runs[key]

    async def _first_headers(self, project: str, trajectory: str, call: LogEntry[AnyEvent] | None) -> Mapping[str, str]:
        """Return the headers of a trajectory's first call, whose `traceparent` decides the trace of all its spans. They
        are read from the log unless `call` is that call; empty if the log no longer holds it."""
        if call is not None and isinstance(call.event, ExchangeRecorded) and not call.event.seq:
            return call.headers
        page = await self._broker.read_page(ExchangeRecorded, project=project, trajectory=trajectory)
        return page.events[0].headers if page.events else {}


async def export(
    messages: Consumption, maker: SpanMaker, backend: TraceBackend, scores_to: langfuse.Destination | None
) -> None:
    """Export the spans and scores of one consumer's events, and acknowledge the events when the backend has them, until
    cancelled. `scores_to`: where scores are written; None: nowhere."""
    while True:
        batch = await messages.batch(BATCH)
        by_event = [await maker.make(delivery) for delivery in batch]
        for request in split_into_requests([span for event_spans, _ in by_event for span in event_spans]):
            await send(backend, request)
        scores = [score for _, event_scores in by_event for score in event_scores]
        if scores_to is not None and scores:
            await langfuse.put(scores_to, scores)
        for delivery in batch:
            await delivery.ack()


async def serve(config: Config, ready: Ready) -> None:
    """Run the service (`pipeline.running.service`) until it is cancelled."""
    backend = TraceBackend.from_environment()
    async with (
        Broker.connect(config.nats, name="telemetry") as broker,
        broker.consume("telemetry-rollouts") as runs,
        broker.consume("telemetry-groups") as groups,
        anyio.create_task_group() as tg,
    ):
        maker = SpanMaker(broker, config.telemetry.content == "all")
        for messages in (runs, groups):
            tg.start_soon(export, messages, maker, backend, langfuse.destination())
        ready()


def check(config: Config) -> None:
    """Raise `ConfigError` if the environment names no usable trace backend, so that the service could not start."""
    TraceBackend.from_environment().close()


if __name__ == "__main__":
    main("pipeline.tracing.exporter", serve, check)
