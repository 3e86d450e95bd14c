"""Writes the events of one durable consumer to the lake: fetch, build tables, commit, then acknowledge.

The effect is exactly-once for three reasons. A commit is atomic. An event is acknowledged only after its commit is
durable. An event that is delivered again, to this process or another, is recognised by its sequence and stream time
(`store.lake.table`); it is acknowledged and not committed twice. Any number of processes may therefore share a
consumer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from pipeline import crash, streams
from pipeline.config import StoreConfig
from pipeline.events import AnyEvent, CheckpointPublished, encode, wire_name
from pipeline.log.broker import Broker, BrokerError
from pipeline.log.consumer import keep_alive, require_consumer
from pipeline.log.fast_client import Pulled
from pipeline.log.messages import Place, parse_ack_subject
from pipeline.log.pulling import ConsumerGoneError, Puller, pulling
from pipeline.telemetry.logs import get_logger
from store.lake import columns
from store.lake.lake import Lake
from store.lake.table import LAKE_ERRORS
from store.lake.versions import copy_version

logger = get_logger("store.lake.writer")

_FETCH = 2_000
_RETRY_S = 1.0
_FINAL_WRITE_S = 8.0
"""When the writer is stopped, it has this long to write the events in memory."""


class Row(NamedTuple):
    """A decoded event, with its stream sequence, stream time (microseconds) and trace parent."""

    event: AnyEvent
    seq: int
    at: int
    trace: str


@dataclass
class WriteBatch:
    """The events that one flush writes and acknowledges."""

    tags: dict[str, list[Row]] = field(default_factory=dict)
    messages: dict[Place, Pulled] = field(default_factory=dict)
    """The newest delivery of each event."""
    size: int = 0
    """Bytes of the encoded events."""
    began: float = 0.0
    """When its first message was received, by `time.monotonic()`."""
    reconnects: int = 0
    """How often the client had reconnected when its first message was received."""


class Writer:
    """Commits the events that the durable consumer `spec` delivers to the tables of the lake."""

    def __init__(self, broker: Broker, lake: Lake, config: StoreConfig, spec: streams.ConsumerSpec) -> None:
        self._broker, self._lake, self._config, self.spec = broker, lake, config, spec
        self._received: deque[Pulled] = deque()
        """Deliveries that are in no batch yet. A cancellation leaves here what it kept from being added."""
        self._filling = WriteBatch()
        self._writing: WriteBatch | None = None
        self._slot = anyio.Semaphore(1)
        """Taken while a batch is written."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled. Events received by then are written before it returns."""
        async with pulling(self._broker.client, self.spec.stream, self.spec.name, ahead=_FETCH) as puller:
            task_status.started()
            try:
                async with anyio.create_task_group() as tg:
                    tg.start_soon(keep_alive, self._broker.client, self.spec, self._waiting)
                    while True:
                        await self._take(puller)
                        if self._is_due():
                            # This bounds memory: one batch is filled while one is written.
                            await self._slot.acquire()
                            batch, self._filling = self._filling, WriteBatch()
                            self._writing = batch
                            tg.start_soon(self._write, batch)
            finally:
                with anyio.move_on_after(_FINAL_WRITE_S, shield=True):
                    if self._writing is not None:
                        # Its task was cancelled, perhaps before its last commit or acknowledgement.
                        await self._finish(self._writing)
                        self._writing = None
                    self._received += puller.take_nowait()
                    await self._fill_batch()
                    await self._finish(self._filling)

    def _waiting(self) -> list[str]:
        """Return the reply subjects of messages that have waited long, for example because the disk is full.
        `keep_alive` extends their ack wait: after `max_deliver` redeliveries an event would become a dead letter."""
        since = time.monotonic() - self.spec.ack_wait_s / 3
        batches = [b for b in (self._writing, self._filling) if b is not None and b.began < since]
        return [message.reply for batch in batches for message in batch.messages.values()]

    def _is_due(self) -> bool:
        """Return whether the batch that is being filled has reached a limit: of events, of bytes or of age."""
        batch, config = self._filling, self._config
        return bool(batch.messages) and (
            len(batch.messages) >= config.flush_rows
            or batch.size >= config.flush_bytes
            or time.monotonic() - batch.began >= config.flush_s
        )

    async def _take(self, puller: Puller) -> None:
        """Wait for deliveries, at most until the batch that is being filled is due, and add them to it."""
        batch = self._filling
        room = max(1, self._config.flush_rows - len(batch.messages))
        wait_s = self._config.flush_s
        if batch.messages:
            wait_s = max(0.01, batch.began + wait_s - time.monotonic())
        try:
            self._received += await puller.take(room, wait_s)
        except ConsumerGoneError as error:
            await require_consumer(self._broker, self.spec, error)
            await anyio.sleep(_RETRY_S)  # no event tells that the server is back
            return
        await self._fill_batch()

    async def _fill_batch(self) -> None:
        """Add what was received to the batch that is being filled."""
        batch = self._filling
        if self._received and not batch.messages:
            batch.began = time.monotonic()
            batch.reconnects = self._broker.client.stats["reconnects"]
        while self._received:
            message = self._received[0]
            place = parse_ack_subject(message.reply)[1]
            if place in batch.messages:
                # Delivered again while it waits here: the acknowledgement answers the newest delivery.
                batch.messages[place] = message
            elif self._writing is None or place not in self._writing.messages:
                # Else it is acknowledged with that batch, whose replies may be on their way already.
                await self._add(batch, place, message)
            self._received.popleft()

    async def _add(self, batch: WriteBatch, place: Place, message: Pulled) -> None:
        """Decode a message and add it to the batch. A message that can't be decoded becomes a dead letter."""
        event = await self._broker.usable_event(message, self.spec)
        if event is None:
            return
        row = Row(event, place.seq, place.at, message.header(b"traceparent"))
        batch.tags.setdefault(wire_name(event), []).append(row)
        message.data = b""  # frees memory: the event holds the content
        batch.messages[place] = message
        batch.size += message.size

    async def _write(self, batch: WriteBatch) -> None:
        """The task that writes a batch while the next one is filled."""
        await self._finish(batch)
        self._writing = None
        self._slot.release()

    async def _finish(self, batch: WriteBatch) -> None:
        """Commit the rows of a batch, then acknowledge its messages. May be called again after any failure."""
        crash.point("store.before_write")
        for tag in list(batch.tags):
            await self._write_tag(batch, tag)
            del batch.tags[tag]
            crash.point("store.between_tags")
        await self._require_whole_log(batch)
        messages = [m.reply for m in batch.messages.values()]
        crash.point("store.before_ack")
        half = len(messages) // 2
        await self._broker.client.acknowledge(messages[:half])
        crash.point("store.half_acked")
        await self._broker.client.acknowledge(messages[half:])
        crash.point("store.after_ack")
        batch.messages = {}

    async def _require_whole_log(self, batch: WriteBatch) -> None:
        """Raise `BrokerError` if a power cut lost the end of the log, and with it the batch's events. Other events get
        their sequences then, and an acknowledgement would count for those."""
        if not batch.messages or batch.reconnects == self._broker.client.stats["reconnects"]:
            return
        newest = max(batch.messages)
        if not await self._broker.has_reached(self.spec.stream, newest):
            raise BrokerError(
                f"the log lost its end: message {newest.seq} of {self.spec.stream} is gone. Start the store again: it "
                "reads the log anew and leaves out what the lake holds"
            )

    async def _write_tag(self, batch: WriteBatch, tag: str) -> None:
        """Commit the events of one tag. Events that do not fit the table become dead letters. Retries while the disk is
        full or object storage can't be reached."""
        rows = batch.tags[tag]
        for row in rows:
            if isinstance(row.event, CheckpointPublished):
                await copy_version(self._broker, self._lake.storage, self._config.checkpoints, row.event)
        while rows:
            try:
                # A thread can't be stopped, so a cancellation waits for it.
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self._commit, tag, rows)
            except columns.UnstorableError:
                await self._drop_unstorable(batch, rows)
                continue
            except LAKE_ERRORS as error:
                if not self._lake.storage.is_retryable(error):
                    raise
                logger.error(
                    "events not written; trying again",
                    folder=str(self._lake),
                    why=str(error),
                    detail=f"{len(rows)} events of {tag} wait. They are not acknowledged and stay on the log",
                )
                await anyio.sleep(_RETRY_S)  # no event tells that the cause is gone
                continue
            return

    def _commit(self, tag: str, rows: list[Row]) -> None:
        """Commit events of one tag to the lake; it blocks. Raises `UnstorableError`, or one of `LAKE_ERRORS`."""
        self._lake.append(tag, columns.table(tag, *zip(*rows, strict=True)))

    async def _drop_unstorable(self, batch: WriteBatch, rows: list[Row]) -> None:
        """Turn the events in `rows` that do not fit the table into dead letters, so that the others can be written."""
        unstorable = [(row, reason) for row in rows if (reason := columns.why_unstorable(row.event))]
        for row, reason in unstorable:
            message = batch.messages.pop(Place(row.seq, row.at))
            message.data = await self._payload(row.seq, row.event)
            await self._broker.dead_letter(message, self.spec, "unstorable", reason)
            rows.remove(row)
        if not unstorable:
            raise columns.UnstorableError(
                "each event fits the table alone, but all together do not: report this as a bug"
            )

    async def _payload(self, seq: int, event: AnyEvent) -> bytes:
        """Return the message at `seq` from the log, or the encoded event if the log no longer holds it."""
        async for message in self._broker.messages(self.spec.stream, seq, seq):
            return message.payload
        return encode(event)


def store_consumers() -> Sequence[streams.ConsumerSpec]:
    """Return the consumers whose events the store writes."""
    return [c for c in streams.CONSUMERS if c.name.startswith("store-")]
