"""One consumer to files: take deliveries, build tables, write, and only then acknowledge.

Exactly once comes from three facts: files appear whole or not at all; an event is acknowledged after its file is durable; and
what comes again although a file holds it is recognised by its sequence and stream time, acknowledged and left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import msgspec
import nats.errors
import nats.js.errors
from anyio.abc import TaskStatus
from nats.aio.msg import Msg

from pipeline import crash, streams
from pipeline.config import StoreConfig
from pipeline.events import AnyEvent, ClaimCheck, decode, encode, wire_name
from pipeline.log.broker import Broker, BrokerUnavailableError, HistoryGoneError
from pipeline.log.deliveries import Pulled, acknowledge
from pipeline.log.messages import Place, parse_ack_subject
from pipeline.log.pull import ConsumerGoneError, Puller, pulling
from pipeline.telemetry.logs import get_logger
from store import columns
from store.catalog import Catalog, FileName

log = get_logger("store.writer")

_RETRY = streams.RETRY_HEADER.encode()
_FETCH = 2_000
_RETRY_S = 1.0
_REMAKE_S = 2.0
_GOODBYE_S = 8.0


@dataclass
class Rows:
    """Decoded events of one tag, column by column as far as the envelope goes."""

    events: list[AnyEvent] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    ats: list[int] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)


@dataclass
class Part:
    """What one flush writes and acknowledges."""

    tags: dict[str, Rows] = field(default_factory=dict)
    taken: dict[tuple[int, int], Pulled] = field(default_factory=dict)
    """(sequence, stream time) to the newest message that brought it."""
    size: int = 0
    began: float = 0.0
    life: int = 0
    """How often the connection had been made anew when its first message came."""


def position(message: Pulled) -> tuple[int, int]:
    """(stream sequence, stream time in microseconds) of a delivery."""
    return parse_ack_subject(message.reply)[1]


class Writer:
    """The durable consumer `spec` to Parquet."""

    def __init__(
        self, broker: Broker, catalog: Catalog, config: StoreConfig, spec: streams.ConsumerSpec
    ) -> None:
        self._broker, self._catalog, self._config, self.spec = broker, catalog, config, spec
        self._part = Part()
        self._writing: Part | None = None
        self._slot = anyio.Semaphore(1)
        self.written = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; what was taken by then is written first."""
        async with pulling(self._broker.client, self.spec, _FETCH) as puller:
            task_status.started()
            try:
                async with anyio.create_task_group() as tg:
                    tg.start_soon(self._keep_alive)
                    while True:
                        await self._take(puller)
                        if self._due():
                            await (
                                self._slot.acquire()
                            )  # bounds memory to one part in the making and one in writing
                            part, self._part = self._part, Part()
                            self._writing = part
                            tg.start_soon(self._write, part)
            finally:
                with anyio.move_on_after(_GOODBYE_S, shield=True):
                    if self._writing is not None:
                        # Cancelled before or while it was acknowledged: its files may be there, or not yet.
                        await self._finish(self._writing)
                        self._writing = None
                    await self._accept(puller.take_nowait())
                    await self._finish(self._part)

    async def _keep_alive(self) -> None:
        """What waits here (for a full disk, say) is not redelivered: only deaths count as deliveries that failed."""
        interval = self.spec.ack_wait_s / 3
        while True:
            await anyio.sleep(interval)
            for part in (self._writing, self._part):
                if part is not None and part.taken and time.monotonic() - part.began > interval:
                    for message in list(part.taken.values()):
                        await self._broker.client.publish(message.reply, Msg.Ack.Progress)

    def _due(self) -> bool:
        part, config = self._part, self._config
        if not part.taken:
            return False
        return (
            len(part.taken) >= config.flush_rows
            or part.size >= config.flush_bytes
            or time.monotonic() - part.began >= config.flush_s
        )

    async def _take(self, puller: Puller) -> None:
        part = self._part
        room = max(1, self._config.flush_rows - len(part.taken))
        wait_s = self._config.flush_s
        if part.taken:
            wait_s = max(0.01, part.began + wait_s - time.monotonic())
        try:
            batch = await puller.take(room, wait_s)
        except ConsumerGoneError as error:
            await self._await_consumer(error)
            return
        await self._accept(batch)

    async def _await_consumer(self, gone: ConsumerGoneError) -> None:
        """The stream or its consumer was deleted: what is in memory is kept and written; the rest is made anew."""
        while True:
            try:
                if await self._there():
                    return  # made anew, or only its server was away for a moment
                log.error(
                    "consumer gone",
                    consumer=self.spec.name,
                    stream=self.spec.stream,
                    why=str(gone),
                    detail="made anew; what its stream held and no file holds is lost to the store",
                )
                # The server removes a deleted stream's folder in the background, and a stream of that name made meanwhile
                # loses its files with it (seen with nats-server 2.15.1).
                await anyio.sleep(_REMAKE_S)
                await self._broker.provision()
            except (
                nats.errors.Error,
                nats.js.errors.Error,
                BrokerUnavailableError,
                OSError,
                TimeoutError,
            ) as error:
                log.warning("log away", consumer=self.spec.name, why=str(error) or type(error).__name__)
                await anyio.sleep(_RETRY_S)  # paces the question to a server that is away

    async def _there(self) -> bool:
        try:
            await self._broker.js.consumer_info(self.spec.stream, self.spec.name)
        except nats.js.errors.NotFoundError:
            return False
        return True

    async def _accept(self, batch: Sequence[Pulled]) -> None:
        if not batch:
            return
        part = self._part
        if not part.taken:
            part.began = time.monotonic()
            part.life = self._broker.client.stats["reconnects"]
        places = [position(m) for m in batch]
        # Told apart in one go, without an await in between: a write that ends meanwhile moves rows from memory to files.
        known = self._catalog.already(self.spec.stream, places)
        writing = self._writing.taken if self._writing is not None else {}
        fresh = [
            (place, message)
            for place, message in zip(places, batch, strict=True)
            if place not in known and place not in writing
        ]
        if known:
            old = [m.reply for place, m in zip(places, batch, strict=True) if place in known]
            await acknowledge(self._broker.client, old)
        for place, message in fresh:
            if place in part.taken:
                part.taken[place] = message  # came again while it waits here
            else:
                await self._admit(part, place, message)

    async def _admit(self, part: Part, place: tuple[int, int], message: Pulled) -> None:
        if message.header(_RETRY) not in ("", self.spec.name):
            await acknowledge(self._broker.client, [message.reply])
            return
        if (deliveries := parse_ack_subject(message.reply)[0]) > self.spec.max_deliver:
            why = f"delivered {deliveries} times without success"
            await self._broker.dead_letter(message, self.spec, "max_deliver", why)
            return
        try:
            event = decode(message.data)
            size = len(message.data)
            if isinstance(event, ClaimCheck):
                size = event.size
                event = await self._broker.claimed_event(event)
        except (msgspec.DecodeError, HistoryGoneError) as error:
            await self._broker.dead_letter(message, self.spec, "undecodable", str(error))
            return
        rows = part.tags.setdefault(wire_name(event), Rows())
        rows.events.append(event)
        rows.seqs.append(place[0])
        rows.ats.append(place[1])
        rows.traces.append(message.header(b"traceparent"))
        message.data = b""  # the event holds it: twice would be much memory
        part.taken[place] = message
        part.size += size

    async def _write(self, part: Part) -> None:
        await self._finish(part)
        self._writing = None
        self._slot.release()

    async def _finish(self, part: Part) -> None:
        """Files, then acknowledgements. Safe to repeat from the start."""
        crash.point("store.before_write")
        for tag in list(part.tags):
            if await self._write_tag(part, tag):
                del part.tags[tag]
                crash.point("store.between_tags")
        messages = [m.reply for m in part.taken.values()] if await self._is_there(part) else []
        crash.point("store.before_ack")
        half = len(messages) // 2
        await acknowledge(self._broker.client, messages[:half])
        crash.point("store.half_acked")
        await acknowledge(self._broker.client, messages[half:])
        crash.point("store.after_ack")
        part.taken = {}

    async def _is_there(self, part: Part) -> bool:
        """Whether the log still holds what was taken. Where a power cut took its end, an acknowledgement would be another
        message's; what is there still is delivered again, and recognised."""
        if not part.taken or part.life == self._broker.client.stats["reconnects"]:
            return True
        return await self._broker.holds(self.spec.stream, Place(*max(part.taken)))

    async def _write_tag(self, part: Part, tag: str) -> bool:
        rows = part.tags[tag]
        while rows.events:
            try:
                # To the end even if cancelled: half-finished work in a thread can't be taken back.
                with anyio.CancelScope(shield=True):
                    name = await anyio.to_thread.run_sync(self._write_file, tag, rows)
            except columns.UnstorableError:
                await self._bury_unstorable(part, rows)
                continue
            except OSError as error:
                if not self._catalog.target.heals(error):
                    raise
                log.error(
                    "not written",
                    folder=str(self._catalog.target),
                    why=str(error),
                    detail=f"{len(rows.events)} events of {tag} wait; they are not acknowledged and stay in the log",
                )
                await anyio.sleep(_RETRY_S)  # paces the retry; nothing says when its cause is gone
                continue
            self._catalog.add(tag, name, rows.seqs)
            self.written += len(rows.seqs)
            return True
        return True

    def _write_file(self, tag: str, rows: Rows) -> FileName:
        table = columns.table(tag, rows.events, rows.seqs, rows.ats, rows.traces)
        first = min(range(len(rows.seqs)), key=rows.seqs.__getitem__)
        name = FileName(self.spec.stream, rows.seqs[first], max(rows.seqs), rows.ats[first])
        self._catalog.target.write(tag, str(name), [table], {"journeyman.event": tag})
        return name

    async def _bury_unstorable(self, part: Part, rows: Rows) -> None:
        """One event that fits no table must not stop the others."""
        reasons = [columns.fits(event) for event in rows.events]
        for i, reason in reversed(list(enumerate(reasons))):
            if not reason:
                continue
            message = part.taken.pop((rows.seqs[i], rows.ats[i]))
            message.data = await self._payload(rows.seqs[i], rows.events[i])
            await self._broker.dead_letter(message, self.spec, "unstorable", reason)
            for values in (rows.events, rows.seqs, rows.ats, rows.traces):
                values.pop(i)
        if not any(reasons):
            raise columns.UnstorableError("events that fit one by one and not together")

    async def _payload(self, seq: int, event: AnyEvent) -> bytes:
        """What the log holds at `seq`; made anew from the event where it has let go of it."""
        async for message in self._broker.messages(self.spec.stream, seq, seq):
            return message.payload
        return encode(event)


def store_consumers() -> Sequence[streams.ConsumerSpec]:
    return [c for c in streams.CONSUMERS if c.name.startswith("store-")]
