"""One consumer to the lake: take deliveries, build tables, commit them, then acknowledge.

Three facts give exactly-once: a commit appears completely or not at all; an event is acknowledged after its commit is
durable; an event that is delivered again after that, to this process or another, is recognised by its sequence and
stream time before it is committed, and acknowledged only (`store.table`). So any number of processes may take from one
consumer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import nats.errors
import nats.js.errors
from anyio.abc import TaskStatus

from pipeline import crash, streams
from pipeline.config import StoreConfig
from pipeline.events import AnyEvent, encode, wire_name
from pipeline.log.broker import Broker, BrokerUnavailableError
from pipeline.log.consumer import ConsumerGoneError, Puller, keep_alive, pulling
from pipeline.log.fast_client import Pulled
from pipeline.log.messages import Place, parse_ack_subject
from pipeline.telemetry import counts
from pipeline.telemetry.logs import get_logger
from store import columns
from store.lake import Lake
from store.table import LakeError

log = get_logger("store.writer")

_FETCH = 2_000
_RETRY_S = 1.0
_REMAKE_S = 2.0
_FINAL_WRITE_S = 8.0
"""The writer may take this long to write what it holds when it is stopped."""


@dataclass
class Rows:
    """Decoded events of one tag with the columns of their envelope."""

    events: list[AnyEvent] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    ats: list[int] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)


@dataclass
class WriteBatch:
    """The events that one flush writes and acknowledges."""

    tags: dict[str, Rows] = field(default_factory=dict)
    messages: dict[tuple[int, int], Pulled] = field(default_factory=dict)
    """(sequence, stream time) to the newest delivery of the event."""
    size: int = 0
    """Bytes of the encoded events."""
    began: float = 0.0
    """`time.monotonic()` when its first message came."""
    reconnects: int = 0
    """How often the connection had been remade when its first message came."""


def position(message: Pulled) -> tuple[int, int]:
    """(stream sequence, stream time in microseconds) of a delivery."""
    return parse_ack_subject(message.reply)[1]


class Writer:
    """Commits what the durable consumer `spec` delivers to the tables of the lake."""

    def __init__(self, broker: Broker, lake: Lake, config: StoreConfig, spec: streams.ConsumerSpec) -> None:
        self._broker, self._lake, self._config, self.spec = broker, lake, config, spec
        self._filling = WriteBatch()
        self._writing: WriteBatch | None = None
        self._slot = anyio.Semaphore(1)
        self.written = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled. Events received by then are written before it returns."""
        async with pulling(self._broker.client, self.spec.stream, self.spec.name, ahead=_FETCH) as puller:
            task_status.started()
            try:
                async with anyio.create_task_group() as tg:
                    tg.start_soon(keep_alive, self._broker.client, self.spec, self._waiting)
                    while True:
                        await self._take(puller)
                        if self._due():
                            await (
                                self._slot.acquire()
                            )  # bounds memory: one batch is filled while one is written
                            batch, self._filling = self._filling, WriteBatch()
                            self._writing = batch
                            tg.start_soon(self._write, batch)
            finally:
                with anyio.move_on_after(_FINAL_WRITE_S, shield=True):
                    if self._writing is not None:
                        # It was cancelled before or during its acknowledgement; its commits may be missing.
                        await self._finish(self._writing)
                        self._writing = None
                    await self._accept(puller.take_nowait())
                    await self._finish(self._filling)

    def _waiting(self) -> list[str]:
        """Return the reply subjects of messages that wait long, for a full disk for example: a redelivery counts as a
        death of the store."""
        since = time.monotonic() - self.spec.ack_wait_s / 3
        batches = [b for b in (self._writing, self._filling) if b is not None and b.began < since]
        return [message.reply for batch in batches for message in batch.messages.values()]

    def _due(self) -> bool:
        batch, config = self._filling, self._config
        return bool(batch.messages) and (
            len(batch.messages) >= config.flush_rows
            or batch.size >= config.flush_bytes
            or time.monotonic() - batch.began >= config.flush_s
        )

    async def _take(self, puller: Puller) -> None:
        batch = self._filling
        room = max(1, self._config.flush_rows - len(batch.messages))
        wait_s = self._config.flush_s
        if batch.messages:
            wait_s = max(0.01, batch.began + wait_s - time.monotonic())
        try:
            delivered = await puller.take(room, wait_s)
        except ConsumerGoneError as error:
            await self._restore_consumer(error)
            return
        await self._accept(delivered)

    async def _restore_consumer(self, gone: ConsumerGoneError) -> None:
        """Create the consumer and its stream again after they were deleted. Events in memory are kept and written."""
        while True:
            try:
                if await self._consumer_exists():
                    return  # it was made again, or only its server was away
                log.error(
                    "consumer gone",
                    consumer=self.spec.name,
                    stream=self.spec.stream,
                    why=str(gone),
                    detail="it is made again; events that were on its stream and are in no file are lost to the store",
                )
                # The server removes a deleted stream's folder in the background, and a stream of that name made
                # meanwhile loses its files with it (seen with nats-server 2.15.1).
                await anyio.sleep(_REMAKE_S)
                await self._broker.provision()
            except (
                nats.errors.Error,
                nats.js.errors.Error,
                BrokerUnavailableError,
                OSError,
                TimeoutError,
            ) as error:
                log.warning(
                    "log unavailable", consumer=self.spec.name, why=str(error) or type(error).__name__
                )
                await anyio.sleep(_RETRY_S)  # paces the retry

    async def _consumer_exists(self) -> bool:
        try:
            await self._broker.js.consumer_info(self.spec.stream, self.spec.name)
        except nats.js.errors.NotFoundError:
            return False
        return True

    async def _accept(self, delivered: Sequence[Pulled]) -> None:
        """Add deliveries to the batch that is being filled."""
        if not delivered:
            return
        batch = self._filling
        if not batch.messages:
            batch.began = time.monotonic()
            batch.reconnects = self._broker.client.stats["reconnects"]
        counts.taken[self.spec.name] += len(delivered)
        for message in delivered:
            place = position(message)
            if self._writing is not None and place in self._writing.messages:
                continue  # acknowledged with that batch
            if place in batch.messages:
                batch.messages[place] = message  # delivered again while it waits here
            else:
                await self._add(batch, place, message)

    async def _add(self, batch: WriteBatch, place: tuple[int, int], message: Pulled) -> None:
        """Decode one message into the batch. One that can't be used becomes a dead letter."""
        event = await self._broker.admit(message, self.spec)
        if event is None:
            return
        rows = batch.tags.setdefault(wire_name(event), Rows())
        rows.events.append(event)
        rows.seqs.append(place[0])
        rows.ats.append(place[1])
        rows.traces.append(message.header(b"traceparent"))
        message.data = b""  # frees the memory: the event holds it
        batch.messages[place] = message
        batch.size += message.size

    async def _write(self, batch: WriteBatch) -> None:
        await self._finish(batch)
        self._writing = None
        self._slot.release()

    async def _finish(self, batch: WriteBatch) -> None:
        """Commit the rows of a batch, then acknowledge its messages. Safe to repeat from the start."""
        crash.point("store.before_write")
        for tag in list(batch.tags):
            await self._write_tag(batch, tag)
            del batch.tags[tag]
            crash.point("store.between_tags")
        messages = [m.reply for m in batch.messages.values()] if await self._log_holds(batch) else []
        crash.point("store.before_ack")
        half = len(messages) // 2
        await self._broker.client.acknowledge(messages[:half])
        crash.point("store.half_acked")
        await self._broker.client.acknowledge(messages[half:])
        crash.point("store.after_ack")
        counts.done[self.spec.name] += len(messages)
        batch.messages = {}

    async def _log_holds(self, batch: WriteBatch) -> bool:
        """Whether the log still holds the batch's events. After a power cut took its end, an acknowledgement could be
        that of another event with the same sequence. Events that are left unacknowledged are delivered again and
        recognised."""
        if not batch.messages or batch.reconnects == self._broker.client.stats["reconnects"]:
            return True
        return await self._broker.holds(self.spec.stream, Place(*max(batch.messages)))

    async def _write_tag(self, batch: WriteBatch, tag: str) -> None:
        """Commit the events of one tag; events that fit no table become dead letters. Repeats while the disk is full or
        object storage is away."""
        rows = batch.tags[tag]
        while rows.events:
            try:
                # Not cancelled in the middle: a thread can't be stopped.
                with anyio.CancelScope(shield=True):
                    self.written += await anyio.to_thread.run_sync(self._commit, tag, rows)
            except columns.UnstorableError:
                await self._drop_unstorable(batch, rows)
                continue
            except LakeError as error:
                if not self._lake.place.is_retryable(error):
                    raise
                log.error(
                    "not written",
                    folder=str(self._lake),
                    why=str(error),
                    detail=f"{len(rows.events)} events of {tag} wait; they are not acknowledged and stay in the log",
                )
                await anyio.sleep(_RETRY_S)  # paces the retry: nothing tells when the cause is gone
                continue
            return

    def _commit(self, tag: str, rows: Rows) -> int:
        table = columns.table(tag, rows.events, rows.seqs, rows.ats, rows.traces)
        return self._lake.append(tag, table)

    async def _drop_unstorable(self, batch: WriteBatch, rows: Rows) -> None:
        """Move the events that fit no table from `rows` to the dead letters, so that the others are written."""
        reasons = [columns.fits(event) for event in rows.events]
        for i, reason in reversed(list(enumerate(reasons))):
            if not reason:
                continue
            message = batch.messages.pop((rows.seqs[i], rows.ats[i]))
            message.data = await self._payload(rows.seqs[i], rows.events[i])
            await self._broker.dead_letter(message, self.spec, "unstorable", reason)
            for values in (rows.events, rows.seqs, rows.ats, rows.traces):
                values.pop(i)
        if not any(reasons):
            raise columns.UnstorableError(
                "events that fit a table one by one do not fit together: report this as a bug"
            )

    async def _payload(self, seq: int, event: AnyEvent) -> bytes:
        """The message at `seq` as the log holds it, or the encoded event where the log no longer does."""
        async for message in self._broker.messages(self.spec.stream, seq, seq):
            return message.payload
        return encode(event)


def store_consumers() -> Sequence[streams.ConsumerSpec]:
    """The consumers that the store writes out."""
    return [c for c in streams.CONSUMERS if c.name.startswith("store-")]
