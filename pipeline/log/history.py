"""The log read where it lies, without a consumer: what a subject holds, its newest event, one sequence number.

A replicated stream has one leader, and only its answer is sure to hold what was acknowledged before: the other replicas lag by
milliseconds, and for longer after a restart. So what a decision rests on is asked of the leader (`STREAM.MSG.GET`). Bulk comes by
the server's batched direct get (NATS ADR-31), which any replica answers, and the leader says at the end whether there is more.

A message that can't be decoded is passed by, and `pass_by` is told of it: one such message must not end its readers.

Every read is repeated while the log is away, for `nats.publish_deadline_s`.

Errors: `BrokerError` and below, of `pipeline.errors`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.errors import (
    BrokerError,
    BrokerUnavailableError,
    HistoryGoneError,
    StreamMissingError,
    UndecodableError,
)
from pipeline.events import AnyEvent, ClaimCheck, decode
from pipeline.log import objects
from pipeline.log.retry import patiently

T = TypeVar("T")

_BATCH = 1000
_PAGE_BYTES = 8 * 1024 * 1024
_YIELD_BYTES = 1024 * 1024
"""Bytes that are decoded before other tasks get a turn: about a millisecond."""
_PASSED_BY_AT_ONCE = 64
"""Undecodable messages that are put among the dead letters at the same time."""
_NO_MESSAGE = 10037
_NO_STREAM = 10059


@dataclass(eq=False)
class Recorded:
    """An event and where it lies."""

    event: AnyEvent
    stream: str
    seq: int
    subject: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Raw(NamedTuple):
    """A message of a stream, undecoded. `headers` hold the server's `Nats-Sequence`, `Nats-Subject` and `Nats-Time-Stamp` too."""

    seq: int
    subject: str
    headers: dict[str, str]
    payload: bytes


class Page(NamedTuple):
    """Some of the events on a subject, in stream order."""

    events: list[Recorded]
    last: int
    """Stream sequence of the last message read, decodable or not."""
    more: bool
    """Whether there may be more behind it."""


class _Stored(msgspec.Struct):
    """The leader's answer; bytes travel as base64."""

    subject: str
    seq: int
    time: str
    data: str = ""
    hdrs: str = ""


class _Answer(msgspec.Struct):
    message: _Stored | None = None
    error: dict[str, Any] | None = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Reader:
    """Reads over one connection."""

    def __init__(self, client: Client, config: NatsConfig) -> None:
        self.client = client
        self.config = config
        self.js = client.jetstream(timeout=config.ack_timeout_s)

    async def read(self, payload: bytes) -> AnyEvent:
        """The event in a payload, claim check resolved. Raises `msgspec.DecodeError`, `HistoryGoneError`."""
        event = decode(payload)
        return await self.resolve(event) if isinstance(event, ClaimCheck) else event

    async def resolve(self, claim: ClaimCheck) -> AnyEvent:
        """The event that was checked in. Raises `HistoryGoneError` where its object is gone."""
        whole = decode(await self.get_object(claim.bucket, claim.object))
        if isinstance(whole, ClaimCheck):
            raise msgspec.DecodeError("a claim check that claims a claim check")
        return whole

    async def whole(self, payload: bytes) -> bytes:
        """What a claim check stands for, as it may outlive its object; anything else, and what is gone, as it is."""
        try:
            event = decode(payload)
            return (
                await self.get_object(event.bucket, event.object)
                if isinstance(event, ClaimCheck)
                else payload
            )
        except (msgspec.DecodeError, HistoryGoneError):
            return payload

    async def pass_by(self, stream: str, raw: Raw, reason: str) -> None:
        """A read met a message that is no event. A `Broker` puts it among the dead letters."""

    async def patiently(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """`call`, repeated while the log is away, for `nats.publish_deadline_s`; see `pipeline.log.retry`."""
        return await patiently(call, what, self.config.publish_deadline_s)

    # -- many ----------------------------------------------------------------------------------------------------

    async def history(
        self, stream: str, subject: str, start_seq: int = 1, *, at_least: int = 0
    ) -> list[Recorded]:
        """Every event on `subject` (wildcards allowed) from `start_seq` on, in stream order.

        All that was acknowledged before the call is in it. A caller that knows how many there are at least spares the
        leader's word with `at_least`."""
        return (await self.history_to(stream, subject, start_seq, at_least=at_least))[0]

    async def history_to(
        self, stream: str, subject: str, start_seq: int = 1, *, at_least: int = 0
    ) -> tuple[list[Recorded], int]:
        """`history`, and the stream sequence of the last message read, decodable or not; `start_seq` - 1 where there is none."""
        out: list[Recorded] = []
        page = Page([], start_seq - 1, more=True)
        while page.more:
            missing = max(at_least - len(out), 0)
            page = await self.page(stream, subject, page.last + 1, at_least=missing)
            out += page.events
        return out, page.last

    async def page(self, stream: str, subject: str, start_seq: int = 1, *, at_least: int = 0) -> Page:
        """The first events on `subject` from `start_seq` on, at most `_PAGE_BYTES` of them (or one).

        Other tasks run between the events of a page, however large they are. The leader's word ends a subject, as with
        `history`."""
        found, more = await self._page(stream, subject, start_seq, _BATCH)
        last = found[-1].seq if found else start_seq - 1
        if not more and not 0 < at_least <= len(found):
            found += await self._next_of_leader(stream, subject, last + 1)
            more = bool(found) and found[-1].seq > last
        out: list[Recorded] = []
        broken: list[tuple[Raw, str]] = []
        decoded = 0
        for raw in found:
            try:
                out.append(await self._recorded(stream, raw))
            except (msgspec.DecodeError, HistoryGoneError) as error:
                broken.append((raw, str(error)))
            last = raw.seq
            decoded += len(raw.payload)
            if decoded > _YIELD_BYTES:
                decoded = 0
                await asyncio.sleep(0)
        await self._pass_by_all(stream, broken)
        return Page(out, last, more)

    async def _pass_by_all(self, stream: str, broken: list[tuple[Raw, str]]) -> None:
        """Many at once: each waits for the log's word, and a start may meet hundreds."""
        for i in range(0, len(broken), _PASSED_BY_AT_ONCE):
            some = broken[i : i + _PASSED_BY_AT_ONCE]
            done = await asyncio.gather(
                *(self.pass_by(stream, raw, why) for raw, why in some), return_exceptions=True
            )
            for error in done:
                if error is not None:
                    raise error

    async def messages(
        self, stream: str, first: int, last: int, subject: str = ">", *, batch: int = _BATCH
    ) -> AsyncGenerator[Raw, None]:
        """What the stream still holds from `first` to `last`, undecoded, in pages of `batch` messages."""
        while first <= last:
            page, _ = await self._page(stream, subject, first, min(batch, last - first + 1))
            page = page or await self._next_of_leader(stream, subject, first)
            for raw in page:
                if raw.seq > last:
                    return
                if raw.subject.startswith(streams.ALIVE):
                    continue  # a probe: no event
                yield raw
            if not page:
                return
            first = page[-1].seq + 1

    async def _page(self, stream: str, subject: str, first: int, batch: int) -> tuple[list[Raw], bool]:
        """What some replica holds on `subject` from `first` on, and whether it holds more."""
        request = {"seq": first, "next_by_subj": subject, "batch": batch, "max_bytes": _PAGE_BYTES}
        page, more = await self.direct_get(stream, request)
        return [_raw(message) for message in page], more and bool(page)

    async def _next_of_leader(self, stream: str, subject: str, first: int) -> list[Raw]:
        """The message that the leader holds next on `subject` from `first` on; empty where that is none."""
        found = await self.leader_get(stream, {"seq": first, "next_by_subj": subject})
        return [] if found is None else [found]

    async def recorded(self, stream: str, raw: Raw) -> Recorded | None:
        """The event in a message; None where it can't be read, which `pass_by` is told."""
        try:
            return await self._recorded(stream, raw)
        except (msgspec.DecodeError, HistoryGoneError) as error:
            await self.pass_by(stream, raw, str(error))
            return None

    async def _recorded(self, stream: str, raw: Raw) -> Recorded:
        return Recorded(await self.read(raw.payload), stream, raw.seq, raw.subject, raw.headers)

    async def subjects(self, stream: str, subject: str) -> list[str]:
        """The subjects within `subject` (wildcards allowed) that hold something: names without the events."""
        out: list[str] = []
        while True:
            info = await self._subjects_info(stream, {"subjects_filter": subject, "offset": len(out)})
            page = info["state"].get("subjects") or {}
            out += page
            if not page or len(out) >= int(info.get("total", 0)):
                return out

    async def count(self, stream: str, subject: str) -> int:
        """How many messages `subject` (no wildcards) holds, without reading them."""
        info = await self._subjects_info(stream, {"subjects_filter": subject})
        return int((info["state"].get("subjects") or {}).get(subject, 0))

    async def _subjects_info(self, stream: str, request: dict[str, Any]) -> dict[str, Any]:
        data = await self._ask(
            f"$JS.API.STREAM.INFO.{stream}", msgspec.json.encode(request), f"the subjects of {stream}"
        )
        info: dict[str, Any] = msgspec.json.decode(data)
        return info

    # -- one -----------------------------------------------------------------------------------------------------

    async def last(self, stream: str, subject: str) -> Recorded | None:
        """The newest event on `subject` (wildcards allowed), by the leader; None where there is none."""
        raw = await self.leader_get(stream, {"last_by_subj": subject})
        if raw is None:
            return None
        recorded = await self.recorded(stream, raw)
        if recorded is not None:
            return recorded
        before = await self.history(stream, subject)
        return before[-1] if before else None

    async def get(self, stream: str, seq: int) -> Recorded:
        """The event at `seq`. Raises `HistoryGoneError` where retention took it, and its `UndecodableError` where it is no
        event."""
        page, _ = await self.direct_get(stream, {"seq": seq})
        # A replica that lags says that there is no such message: only the leader knows.
        raw = _raw(page[0]) if page else await self.leader_get(stream, {"seq": seq})
        if raw is None:
            raise HistoryGoneError(f"message {seq} of {stream}")
        recorded = await self.recorded(stream, raw)
        if recorded is None:
            raise UndecodableError(stream, seq)
        return recorded

    # -- requests ------------------------------------------------------------------------------------------------

    async def leader_get(self, stream: str, request: dict[str, Any]) -> Raw | None:
        """One message by the stream's leader, which holds all that was acknowledged: by `seq`, by `last_by_subj`, or the
        first from `seq` on of `next_by_subj`. None where it holds no such message."""
        subject = f"$JS.API.STREAM.MSG.GET.{stream}"
        try:
            data = await self._ask(subject, msgspec.json.encode(request), f"a read of {stream}")
        except nats.js.errors.APIError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            if error.err_code == _NO_STREAM:
                raise StreamMissingError(stream) from error
            raise BrokerError(f"a read of {stream} failed: {error.description}") from error
        found = _decode_answer(data).message
        if found is None:
            raise BrokerError(f"a read of {stream} was answered without a message")
        headers = _parsed(base64.b64decode(found.hdrs))
        headers |= {
            "Nats-Sequence": str(found.seq),
            "Nats-Subject": found.subject,
            "Nats-Time-Stamp": found.time,
        }
        return Raw(found.seq, found.subject, headers, base64.b64decode(found.data))

    async def _ask(self, subject: str, request: bytes, what: str) -> bytes:
        """A request to JetStream's API. Raises nats-py's `APIError` for what it refuses, `BrokerUnavailableError`."""

        async def once() -> bytes:
            reply = await self.client.request(subject, request, timeout=self.config.ack_timeout_s)
            data = bytes(reply.data)
            error = _decode_answer(data).error
            if error is not None:
                raise nats.js.errors.APIError.from_error(error)
            return data

        return await self.patiently(once, f"{what} was not answered")

    async def direct_get(self, stream: str, request: dict[str, Any]) -> tuple[list[Msg], bool]:
        """The server's direct get, batched where `request` says so: messages, and whether there are more.

        Any replica answers, also one that lags. Empty where none answers at all: ask the leader then."""
        return await self.patiently(
            lambda: self._direct_get(stream, request), f"a read of {stream} was not answered"
        )

    async def _direct_get(self, stream: str, request: dict[str, Any]) -> tuple[list[Msg], bool]:
        inbox = self.client.new_inbox()
        sub = await self.client.subscribe(inbox)
        batched = "batch" in request
        out: list[Msg] = []
        try:
            await self.client.publish(
                f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), reply=inbox
            )
            while True:
                message = await sub.next_msg(timeout=self.config.ack_timeout_s)
                headers = message.headers or {}
                status = headers.get("Status")
                if status == "204":
                    return out, int(headers.get("Nats-Num-Pending", "0")) > 0
                if status in ("404", "503"):
                    return out, False
                if status is not None:
                    raise BrokerError(f"direct get from {stream}: {status} {headers.get('Description', '')}")
                before = int((out[-1].headers or {})["Nats-Sequence"]) if out else 0
                if batched and int(headers.get("Nats-Last-Sequence", before)) != before:
                    if not out:
                        raise BrokerUnavailableError(f"a read of {stream} lost its beginning")
                    return (
                        out,
                        True,
                    )  # the connection broke in between: what was lost with it is asked for again
                out.append(message)
                if not batched:
                    return out, False
        except nats.errors.TimeoutError as error:
            if out:
                return out, True  # the replica died meanwhile: what came is whole, and another one goes on
            raise BrokerUnavailableError(f"{stream} did not answer a read") from error
        finally:
            if not self.client.is_closed:
                await sub.unsubscribe()

    async def stream_info(self, stream: str) -> api.StreamInfo:
        """What the leader says of a stream. Raises `BrokerError` where there is no such stream."""
        return await self._info(lambda: self.js.stream_info(stream), f"stream {stream}")

    async def consumer_info(self, stream: str, consumer: str) -> api.ConsumerInfo:
        """What the leader says of a consumer. Raises `BrokerError` where there is no such consumer."""
        return await self._info(lambda: self.js.consumer_info(stream, consumer), f"consumer {consumer}")

    async def _info(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            return await self.patiently(call, f"{what} was not described")
        except nats.js.errors.NotFoundError as error:
            raise BrokerError(f"the log has no {what}: start `journeyman up` on it once") from error

    async def get_object(self, bucket: str, name: str) -> bytes:
        """The object's bytes, digest checked; raises `HistoryGoneError` where it is not there."""
        return await objects.get(self, bucket, name)


def _raw(message: Msg) -> Raw:
    """A message that came by direct get."""
    headers = dict(message.headers or {})
    return Raw(int(headers["Nats-Sequence"]), headers["Nats-Subject"], headers, message.data)


def _parsed(block: bytes) -> dict[str, str]:
    """A header block: a line of version, a line for each header, an empty one."""
    lines = (line.partition(":") for line in block.decode("utf-8", "replace").split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in lines}
