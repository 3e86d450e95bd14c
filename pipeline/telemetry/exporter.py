"""The service that turns the log into traces: reads events, makes spans (`pipeline.telemetry.spans`) and Langfuse
scores, and exports them over HTTP.

It has its own durable consumers: no service waits for the trace backend, and events stay on the log until the
backend has their spans (`pipeline.telemetry.backend`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

import anyio
from opentelemetry.sdk.trace import ReadableSpan

from pipeline.config import Config
from pipeline.events import (
    AnyEvent,
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    PolicyLoaded,
    TrajectoryCompleted,
    TrajectoryOpened,
    unpack_seqs,
)
from pipeline.log.broker import Broker, Consumption, HistoryGoneError, Recorded
from pipeline.log.messages import Place
from pipeline.running.service import Ready, main
from pipeline.telemetry import scores, spans
from pipeline.telemetry.backend import TraceBackend, requests_of, send
from pipeline.telemetry.content import Content
from pipeline.telemetry.langfuse import Langfuse, Score, destination
from pipeline.telemetry.trace import Run, caller, make_run

T = TypeVar("T")

BATCH = 512
_REMEMBERED = 10_000


class SpanMaker:
    """Makes the spans and the scores of an event, with what the log says about its trajectory."""

    def __init__(self, broker: Broker, content: Content) -> None:
        self._broker, self._content = broker, content
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], int] = OrderedDict()
        """End of the newest call of a trajectory, in microseconds."""

    async def make(self, recorded: Recorded[AnyEvent]) -> tuple[list[ReadableSpan], list[Score]]:
        event, content = recorded.event, self._content
        match event:
            case ExchangeRecorded():
                run = await self._run(event.project, event.trajectory, event.group, event.model, recorded)
                since, called_by = (
                    self._since(event),
                    caller(event.project, event.trajectory, recorded.headers),
                )
                return spans.call_spans(event, run, content, since, called_by), []
            case TrajectoryCompleted():
                run = await self._run(event.project, event.trajectory, event.group, event.model)
                last = await self._last(event) if content.shown else None
                return [spans.run_span(event, run, last, content)], scores.agent_scores(event, run)
            case GroupScored():
                runs = [
                    await self._run(event.project, m.trajectory, event.group, event.model)
                    for m in event.members
                ]
                judged = list(zip(event.members, runs, strict=True))
                return (
                    [s for m, run in judged for s in spans.verdict_spans(event, m, run, content)],
                    [s for m, run in judged for s in scores.verdict_scores(event, m, run, content)],
                )
            case CheckpointPublished():
                return spans.step_spans(event, await self._learned_from(event)), []
            case PolicyLoaded():
                step = await self._broker.read_last(
                    CheckpointPublished, project=event.project, model=event.model, step=event.step
                )
                if step is None:
                    return [], []  # the base model has no training step
                return spans.load_spans(event, step.event, await self._learned_from(step.event)), []
            case _:
                return [], []

    def _since(self, event: ExchangeRecorded) -> int:
        """Return when the call before this one ended; 0 if that is not known."""
        key = (event.project, event.trajectory)
        since = self._ended.get(key, 0)
        _remember(self._ended, key, event.at)
        return since

    async def _last(self, event: TrajectoryCompleted) -> ExchangeRecorded | None:
        last = await self._broker.read_last(
            ExchangeRecorded, project=event.project, trajectory=event.trajectory
        )
        return last.event if last else None

    async def _learned_from(self, event: CheckpointPublished) -> list[Run]:
        runs = []
        seqs = unpack_seqs(event.group_seqs).tolist()
        times = unpack_seqs(event.group_times).tolist() or [0] * len(seqs)
        for seq, at in zip(seqs, times, strict=True):
            try:
                recorded = await self._broker.read_at(GroupScored, seq)
            except HistoryGoneError:
                continue  # retention deleted the group
            # After a power cut, another group may have this sequence.
            if recorded.place.matches(Place(seq, at)) and recorded.event.group in event.groups:
                runs += [
                    await self._run(event.project, m.trajectory, recorded.event.group, event.model)
                    for m in recorded.event.members
                ]
        return runs

    async def _run(
        self,
        project: str,
        trajectory: str,
        group: str,
        model: str,
        call: Recorded[AnyEvent] | None = None,
    ) -> Run:
        """Return a trajectory as its spans show it. `call` is one of its calls."""
        key = (project, trajectory)
        if key not in self._runs:
            opened = await self._broker.read_last(TrajectoryOpened, project=project, trajectory=trajectory)
            context = caller(project, trajectory, opened.headers) if opened else None
            context = context or caller(
                project, trajectory, await self._first_headers(project, trajectory, call)
            )
            event = opened.event if opened else None
            run = make_run(project, trajectory, group, model, event, context, self._content)
            _remember(self._runs, key, run)
        return self._runs[key]

    async def _first_headers(
        self, project: str, trajectory: str, call: Recorded[AnyEvent] | None
    ) -> Mapping[str, str]:
        """Return the headers of a trajectory's first call: all its spans are in the trace that this call brought."""
        if call is not None and isinstance(call.event, ExchangeRecorded) and not call.event.seq:
            return call.headers
        page = await self._broker.read_page(ExchangeRecorded, project=project, trajectory=trajectory)
        return page.events[0].headers if page.events else {}


def _remember(known: OrderedDict[tuple[str, str], T], key: tuple[str, str], value: T) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > _REMEMBERED:
        known.popitem(last=False)


async def export(
    messages: Consumption, maker: SpanMaker, backend: TraceBackend, langfuse: Langfuse | None
) -> None:
    """Export the spans and scores of one consumer's events, and acknowledge the events when the backend has them.

    `langfuse`: where scores are written; None: nowhere."""
    while True:
        batch = await messages.batch(BATCH)
        made = [await maker.make(delivery) for delivery in batch]
        for spans_of_request in requests_of([span for some, _ in made for span in some]):
            await send(backend, spans_of_request)
        if langfuse is not None:
            await langfuse.put([score for _, some in made for score in some])
        for delivery in batch:
            await delivery.ack()


async def serve(config: Config, ready: Ready) -> None:
    settings = config.telemetry
    backend, content, to = TraceBackend.from_environment(), Content(settings), destination()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(Broker.connect(config.nats, name="telemetry"))
        langfuse = await stack.enter_async_context(Langfuse.connect(to)) if to else None
        maker = SpanMaker(broker, content)
        consumed = [
            await stack.enter_async_context(broker.consume(f"telemetry-{name}"))
            for name in ("rollouts", "groups", "policy")
        ]
        async with anyio.create_task_group() as tg:
            for messages in consumed:
                tg.start_soon(export, messages, maker, backend, langfuse if settings.scores else None)
            ready()


def check(config: Config) -> None:
    """Raise `ConfigError` if the service could not start with these settings."""
    Content(config.telemetry)
    TraceBackend.from_environment().close()


if __name__ == "__main__":
    main("pipeline.telemetry.exporter", serve, check)
