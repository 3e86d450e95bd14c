"""Typed reads of the log: the event class gives the stream, the subject and the type of what is returned.

    await log.read(ExchangeRecorded, project="p", trajectory="t-1")

`Reader` is the part of `Broker` (`pipeline.log.broker`) that reads. It returns a `LogEntry`: the event with its place
in the stream. On the stream an event may be a *claim check*, which names an object with the event
(`pipeline.log.objects`), and an exchange may be a *continuation* of an earlier one (`pipeline.log.exchanges`); readers
get the event itself.

A message that cannot be decoded is skipped and handed to `skip_undecodable`, so that one such message does not end
its readers. Errors: `BrokerError` and its subclasses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.config import NatsConfig
from pipeline.errors import HistoryGoneError
from pipeline.events import AnyEvent, ClaimCheck, Continuation, Event, ExchangeRecorded, decode
from pipeline.log import objects
from pipeline.log.exchanges import ExchangeNotWholeError, RememberedExchanges, make_whole
from pipeline.log.fast_client import FastClient
from pipeline.log.messages import LogEntry, Page, StoredMessage
from pipeline.log.stream_reader import StreamReader
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.log.history")

E = TypeVar("E", bound=Event)

_YIELD_BYTES = 1024 * 1024
"""Bytes that are decoded before other tasks get a turn: about a millisecond."""
_WHOLE_BYTES = 64 * 1024 * 1024
"""Bytes of requests and answers after which a page ends: the log may hold them as claim checks and continuations, which
are small."""


class Reader(StreamReader):
    """Reads events over one connection. `keys` are fields of the event's subject, strings or numbers
    (`pipeline.log.subjects`). Exchanges are whole, however the log holds them (`pipeline.log.exchanges`)."""

    def __init__(self, client: FastClient, config: NatsConfig) -> None:
        super().__init__(client, config)
        self.exchanges = RememberedExchanges(config.exchange_memory_bytes)
        """Exchanges that were read or written over this connection."""

    # -- many events ---------------------------------------------------------------------------------------------

    async def read(self, event: type[E], *, start_seq: int = 1, at_least: int = 0, **keys: Any) -> list[LogEntry[E]]:
        """Return every event of a class from sequence `start_seq` on, in stream order.

        The result holds everything that was acknowledged before the call. If the caller knows the number of
        events (`at_least`), one request to the leader is saved."""
        stream, subject = stream_of(event), subject_filter(event, **keys)
        out: list[LogEntry[E]] = []
        page = Page[E]([], start_seq - 1, more=True)
        while page.more:
            page = await self._page(event, stream, subject, page.last + 1, max(at_least - len(out), 0))
            out += page.events
        return out

    async def read_page(self, event: type[E], start_seq: int = 1, **keys: Any) -> Page[E]:
        """Return the first events of a class from sequence `start_seq` on: at most 8 MiB as the log holds them, and
        `_WHOLE_BYTES` of whole exchanges (or one more).

        Other tasks run between the events of a page. The leader's answer ends a subject, as with `read`."""
        return await self._page(event, stream_of(event), subject_filter(event, **keys), start_seq, 0, _WHOLE_BYTES)

    async def read_all(self, events: Sequence[type[E]], *, start_seq: int = 1, **keys: Any) -> list[LogEntry[E]]:
        """Return the events of several classes of one stream, in stream order, up to the stream's newest message at the
        time of the call.

        The classes are read one after the other. Events that come meanwhile are left out, as only those of the classes
        that are read last would be there."""
        end = (await self.stream_info(stream_of(events[0]))).state.last_seq
        recorded = [r for event in events for r in await self.read(event, start_seq=start_seq, **keys)]
        return sorted((r for r in recorded if r.seq <= end), key=lambda r: r.seq)

    async def _page(
        self, event: type[E], stream: str, subject: str, start_seq: int, at_least: int, max_whole_bytes: int = 0
    ) -> Page[E]:
        """Return the events in the next messages of a subject, decoded. `at_least`: as in `_next_messages`.
        `max_whole_bytes`: bytes of whole exchanges after which the page ends, 0: no limit."""
        messages, more = await self._next_messages(stream, subject, start_seq, at_least)
        out: list[LogEntry[E]] = []
        not_whole: list[int] = []
        last, decoded_bytes, whole_bytes = start_seq - 1, 0, 0
        for message in messages:
            try:
                entry = await self._entry(stream, message)
            except ExchangeNotWholeError as error:
                logger.error("exchange not read", why=str(error))
                not_whole.append(error.seq)
                entry = None
            if (entry_of_class := _of_class(entry, event)) is not None:
                out.append(entry_of_class)
            if entry is not None and isinstance(entry.event, ExchangeRecorded):
                whole_bytes += len(entry.event.request) + len(entry.event.response)
            last = message.seq
            if 0 < max_whole_bytes < whole_bytes and message is not messages[-1]:
                return Page(out, last, True, not_whole)
            decoded_bytes += len(message.payload)
            if decoded_bytes > _YIELD_BYTES:
                decoded_bytes = 0
                await asyncio.sleep(0)
        return Page(out, last, more, not_whole)

    async def _next_messages(
        self, stream: str, subject: str, start_seq: int, at_least: int
    ) -> tuple[list[StoredMessage], bool]:
        """Return the next messages of a subject, and whether there may be more.

        A replica answers. Where it says that it holds no more, the leader is asked for the next message, because the
        replica may lag. That request is saved if as many messages came as were expected (`at_least`; 0: unknown)."""
        messages, more = await self.message_page(stream, subject, start_seq)
        if more or 0 < at_least <= len(messages):
            return messages, more
        first = messages[-1].seq + 1 if messages else start_seq
        newer = await self.next_of_leader(stream, subject, first)
        return messages + newer, bool(newer)

    async def count(self, event: type[Event], **keys: Any) -> int:
        """Return how many events a subject holds, without reading them; `keys` must name the whole subject."""
        subject = subject_filter(event, **keys)
        info = await self.subjects_info(stream_of(event), {"subjects_filter": subject})
        return int((info["state"].get("subjects") or {}).get(subject, 0))

    # -- one event -----------------------------------------------------------------------------------------------

    async def read_last(self, event: type[E], **keys: Any) -> LogEntry[E] | None:
        """Return the newest event of a class that can be decoded; None if there is none. The stream's leader is asked,
        so nothing that was acknowledged is missed."""
        message = await self.leader_get(stream_of(event), {"last_by_subj": subject_filter(event, **keys)})
        if message is None:
            return None
        newest = _of_class(await self.recorded(stream_of(event), message), event)
        if newest is not None:
            return newest
        # It can't be decoded, or is no event of the class.
        all_events = await self.read(event, **keys)
        return all_events[-1] if all_events else None

    async def read_at(self, event: type[E], seq: int) -> LogEntry[E]:
        """Return the event of a class at a sequence of its stream.

        Raises `HistoryGoneError` if no event of that class has that sequence (any more): the message was deleted, it is
        no event, its object is gone, or an event of another class took its place after a power cut. Its subclass
        `ExchangeNotWholeError` says that the event continues an exchange that is gone."""
        stream = stream_of(event)
        message = await self.leader_get(stream, {"seq": seq})
        if message is None:
            raise HistoryGoneError(f"message {seq} of {stream}")
        entry = await self._entry(stream, message)
        if entry is None:
            raise HistoryGoneError(f"message {seq} of {stream}", "can't be decoded: see `journeywork dead list`")
        if (entry_of_class := _of_class(entry, event)) is None:
            raise HistoryGoneError(f"the {event.__name__} at message {seq} of {stream}")
        return entry_of_class

    async def recorded(self, stream: str, message: StoredMessage) -> LogEntry[AnyEvent] | None:
        """Return the event in a message of `stream`. None if it cannot be decoded, for which
        `skip_undecodable` is called, or continues an exchange that is gone, which is logged."""
        try:
            return await self._entry(stream, message)
        except ExchangeNotWholeError as error:
            logger.error("exchange not read", why=str(error))
            return None

    async def _entry(self, stream: str, message: StoredMessage) -> LogEntry[AnyEvent] | None:
        """Return the event in a message. None if it cannot be decoded; `skip_undecodable` is called then. Raises
        `ExchangeNotWholeError` if it continues an exchange that is gone: the message itself is no dead letter."""
        try:
            event = await self.decode(message.payload)
        except ExchangeNotWholeError:
            raise
        except (msgspec.DecodeError, HistoryGoneError) as error:
            await self.skip_undecodable(stream, message, str(error))
            return None
        return LogEntry(event, stream, message.place, message.subject, message.headers)

    async def skip_undecodable(self, stream: str, message: StoredMessage, reason: str) -> None:
        """Called with each message that a read skips because it is no event, and why. Does nothing here; `Broker`
        overrides it and puts the message among the dead letters."""

    # -- payloads ------------------------------------------------------------------------------------------------

    async def decode(self, payload: bytes) -> AnyEvent:
        """Return the event in a payload; a claim check is replaced by its event, a continuation by its exchange.

        Raises `msgspec.DecodeError`, and `HistoryGoneError` if the claim check's object has expired or the exchange
        can't be made whole."""
        return await self.event_of(decode(payload))

    async def event_of(self, form: AnyEvent | ClaimCheck | Continuation) -> AnyEvent:
        """Return the event that a decoded payload stands for. Raises as `decode` does."""
        if isinstance(form, ClaimCheck):
            form = decode(await self.get_object(form.bucket, form.object))
        if isinstance(form, ClaimCheck):
            raise msgspec.DecodeError("the object of a claim check is a claim check itself")
        if isinstance(form, ExchangeRecorded | Continuation):
            return await make_whole(self, self.exchanges, form)
        return form

    async def resolve(self, payload: bytes) -> bytes:
        """Replace a claim check by its object. Return the payload unchanged if it is no claim check or the object has
        expired."""
        try:
            event = decode(payload)
            if isinstance(event, ClaimCheck):
                return await self.get_object(event.bucket, event.object)
        except (msgspec.DecodeError, HistoryGoneError):
            pass
        return payload

    async def get_object(self, bucket: str, name: str) -> bytes:
        """Return the object's bytes, digest checked. Raises `HistoryGoneError` if the bucket does not hold it."""
        return await objects.get(self, bucket, name)


def _of_class(recorded: LogEntry[AnyEvent] | None, event: type[E]) -> LogEntry[E] | None:
    """Return `recorded` if it is an event of the class."""
    if recorded is None or not isinstance(recorded.event, event):
        return None
    return recorded  # type: ignore[return-value]  # the class of its event was just checked
