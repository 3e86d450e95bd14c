"""The service that turns the log into traces: reads events, makes spans (`pipeline.telemetry.spans`), exports over
OTLP/HTTP.

It has its own durable consumers: no service waits for the trace backend, and events stay on the log until the
backend has their spans. The destination comes from the standard `OTEL_EXPORTER_OTLP_*` variables or by Langfuse's
(`LANGFUSE_PUBLIC_KEY`, `LANGFUSE_SECRET_KEY`, `LANGFUSE_HOST`).
"""

from __future__ import annotations

import base64
import os
from collections import OrderedDict

import anyio
import anyio.to_thread
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pipeline.config import Config, ConfigError
from pipeline.events import (
    AnyEvent,
    CheckpointPublished,
    ExchangeRecorded,
    GroupScored,
    PolicyLoaded,
    TrajectoryCompleted,
    unpack_seqs,
)
from pipeline.log.broker import Broker, Consumption, HistoryGoneError, Recorded
from pipeline.log.messages import Place
from pipeline.running.service import Ready, main
from pipeline.telemetry import spans
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.telemetry.exporter")

BATCH = 512
RETRY_S = 5.0
_REMEMBERED = 10_000


def make_exporter() -> SpanExporter:
    """Return the OTLP/HTTP exporter that the environment configures. Raises `ConfigError` if it configures none."""
    if secret := os.environ.get("LANGFUSE_SECRET_KEY"):
        public = os.environ.get("LANGFUSE_PUBLIC_KEY")
        host = os.environ.get("LANGFUSE_HOST") or os.environ.get("LANGFUSE_BASE_URL")
        if not public or not host:
            raise ConfigError("LANGFUSE_SECRET_KEY is set: set LANGFUSE_PUBLIC_KEY and LANGFUSE_HOST too")
        token = base64.b64encode(f"{public}:{secret}".encode()).decode()
        return OTLPSpanExporter(
            endpoint=f"{host.rstrip('/')}/api/public/otel/v1/traces",
            headers={"Authorization": f"Basic {token}", "x-langfuse-ingestion-version": "4"},
        )
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return OTLPSpanExporter()
    raise ConfigError(
        "telemetry is on, but neither OTEL_EXPORTER_OTLP_ENDPOINT nor LANGFUSE_SECRET_KEY is set"
    )


class SpanMaker:
    """Makes the spans of an event, and reads the trace context of its trajectory from the log."""

    def __init__(self, broker: Broker, *, content: bool) -> None:
        self._broker, self._content = broker, content
        self._parents: OrderedDict[tuple[str, str], spans.Parent] = OrderedDict()

    async def make(self, recorded: Recorded[AnyEvent]) -> list[ReadableSpan]:
        event = recorded.event
        match event:
            case ExchangeRecorded():
                parent = spans.parent_of(event.project, event.trajectory, recorded.headers)
                self._remember((event.project, event.trajectory), parent)
                return [spans.chat_span(event, parent, content=self._content)]
            case TrajectoryCompleted():
                return [spans.run_span(event, await self._parent(event.project, event.trajectory))]
            case GroupScored():
                return [
                    spans.verdict_span(
                        event, m, await self._parent(event.project, m.trajectory), content=self._content
                    )
                    for m in event.members
                ]
            case CheckpointPublished():
                return [
                    spans.step_span(event, trajectory, group, await self._parent(event.project, trajectory))
                    for trajectory, group in await self._learned_from(event)
                ]
            case PolicyLoaded():
                return await self._load_spans(event)
            case _:
                return []

    async def _load_spans(self, event: PolicyLoaded) -> list[ReadableSpan]:
        checkpoint = await self._broker.read_last(
            CheckpointPublished, project=event.project, model=event.model, step=event.step
        )
        if checkpoint is None:
            return []  # the base model has no training step
        return [
            spans.load_span(event, trajectory, group, await self._parent(event.project, trajectory))
            for trajectory, group in await self._learned_from(checkpoint.event)
        ]

    async def _learned_from(self, event: CheckpointPublished) -> list[tuple[str, str]]:
        found = []
        seqs = unpack_seqs(event.group_seqs).tolist()
        times = unpack_seqs(event.group_times).tolist() or [0] * len(seqs)
        for seq, at in zip(seqs, times, strict=True):
            try:
                recorded = await self._broker.read_at(GroupScored, seq)
            except HistoryGoneError:
                continue  # retention deleted the group
            # After a power cut, another group may have this sequence.
            if recorded.place.matches(Place(seq, at)) and recorded.event.group in event.groups:
                found += [(m.trajectory, recorded.event.group) for m in recorded.event.members]
        return found

    async def _parent(self, project: str, trajectory: str) -> spans.Parent:
        key = (project, trajectory)
        if key not in self._parents:
            last = await self._broker.read_last(ExchangeRecorded, project=project, trajectory=trajectory)
            self._remember(key, spans.parent_of(project, trajectory, last.headers if last else {}))
        return self._parents[key]

    def _remember(self, key: tuple[str, str], parent: spans.Parent) -> None:
        self._parents[key] = parent
        while len(self._parents) > _REMEMBERED:
            self._parents.popitem(last=False)


async def export(messages: Consumption, maker: SpanMaker, exporter: SpanExporter) -> None:
    """Export the spans of one consumer's events, and acknowledge the events when the backend has them."""
    while True:
        batch = await messages.batch(BATCH)
        made = [span for delivery in batch for span in await maker.make(delivery)]
        while made and await anyio.to_thread.run_sync(exporter.export, made) is not SpanExportResult.SUCCESS:
            log.warning("the trace backend refused the spans; retrying", spans=len(made), after_s=RETRY_S)
            await anyio.sleep(RETRY_S)
        for delivery in batch:
            await delivery.ack()


async def serve(config: Config, ready: Ready) -> None:
    exporter = make_exporter()
    async with Broker.connect(config.nats, name="telemetry") as broker:
        maker = SpanMaker(broker, content=config.telemetry.content)
        async with (
            broker.consume("telemetry-rollouts") as rollouts,
            broker.consume("telemetry-groups") as groups,
            broker.consume("telemetry-policy") as policy,
            anyio.create_task_group() as tg,
        ):
            for messages in (rollouts, groups, policy):
                tg.start_soon(export, messages, maker, exporter)
            ready()


if __name__ == "__main__":
    main("pipeline.telemetry.exporter", serve, lambda config: make_exporter().shutdown())
