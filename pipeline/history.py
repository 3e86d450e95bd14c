"""The log read where it lies, without a consumer: what a subject holds, its newest event, one sequence number.

By the server's batched direct get (NATS ADR-31), which any replica of a stream answers.

Errors: `BrokerError` and below, of `pipeline.errors`; `msgspec.DecodeError` on what is no event of a known kind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from pipeline import objects, streams
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError, BrokerUnavailableError, HistoryGoneError
from pipeline.events import AnyEvent, ClaimCheck, decode

_BATCH = 1000
_PAGE_BYTES = 8 * 1024 * 1024
_YIELD_BYTES = 1024 * 1024
"""Bytes that are decoded before other tasks get a turn: about a millisecond."""


@dataclass(eq=False)
class Recorded:
    """An event and where it lies."""

    event: AnyEvent
    stream: str
    seq: int
    subject: str
    headers: Mapping[str, str] = field(default_factory=dict)


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

    async def history(self, stream: str, subject: str, start_seq: int = 1) -> list[Recorded]:
        """Every event on `subject` (wildcards allowed) from `start_seq` on, in stream order."""
        out: list[Recorded] = []
        while start_seq:
            page, start_seq = await self.page(stream, subject, start_seq)
            out += page
        return out

    async def page(self, stream: str, subject: str, start_seq: int = 1) -> tuple[list[Recorded], int]:
        """The first events on `subject` from `start_seq` on, at most `_PAGE_BYTES` of them (or one), and the sequence to go
        on from, 0 where there are no more. Other tasks run between the events of a page, however large they are."""
        out: list[Recorded] = []
        page, more = await self.direct_get(
            stream, {"seq": start_seq, "next_by_subj": subject, "batch": _BATCH, "max_bytes": _PAGE_BYTES}
        )
        decoded = following = 0
        for message in page:
            headers = dict(message.headers or {})
            seq = int(headers["Nats-Sequence"])
            following = seq + 1
            out.append(Recorded(await self.read(message.data), stream, seq, headers["Nats-Subject"], headers))
            decoded += len(message.data)
            if decoded > _YIELD_BYTES:
                decoded = 0
                await asyncio.sleep(0)
        return out, following if more else 0

    async def count(self, stream: str, subject: str) -> int:
        """How many messages `subject` (no wildcards) holds, without reading them."""
        info = await self._subjects_info(stream, {"subjects_filter": subject})
        return int((info["state"].get("subjects") or {}).get(subject, 0))

    async def messages(
        self, stream: str, first: int, last: int
    ) -> AsyncIterator[tuple[int, str, dict[str, str], bytes]]:
        """(sequence, subject, headers, payload) of what the stream still holds from `first` to `last`, undecoded."""
        while first <= last:
            batch = min(_BATCH, last - first + 1)
            page, _ = await self.direct_get(stream, {"seq": first, "next_by_subj": ">", "batch": batch})
            if not page:
                return
            for message in page:
                headers = dict(message.headers or {})
                first = int(headers["Nats-Sequence"])
                if first > last:
                    return
                if headers["Nats-Subject"].startswith(streams.ALIVE):
                    continue  # a probe: no event
                yield first, headers["Nats-Subject"], headers, message.data
            first += 1

    async def last(self, stream: str, subject: str) -> Recorded | None:
        """The newest event on `subject`, or none."""
        page, _ = await self.direct_get(stream, {"last_by_subj": subject})
        for message in page:
            headers = dict(message.headers or {})
            seq = int(headers["Nats-Sequence"])
            return Recorded(await self.read(message.data), stream, seq, headers["Nats-Subject"], headers)
        return None

    async def subjects(self, stream: str, subject: str) -> list[str]:
        """The subjects within `subject` (wildcards allowed) that hold something: names without the events."""
        out: list[str] = []
        while True:
            info = await self._subjects_info(stream, {"subjects_filter": subject, "offset": len(out)})
            page = info["state"].get("subjects") or {}
            out += page
            if not page or len(out) >= int(info.get("total", 0)):
                return out

    async def _subjects_info(self, stream: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = await self.client.request(
                f"$JS.API.STREAM.INFO.{stream}",
                msgspec.json.encode(request),
                timeout=self.config.ack_timeout_s,
            )
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError) as error:
            raise BrokerUnavailableError(f"{stream} did not answer: is the NATS server up?") from error
        info: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in info:
            raise BrokerError(f"subjects of {stream}: {info['error'].get('description', '')}")
        return info

    async def get(self, stream: str, seq: int) -> Recorded:
        """The event at `seq`; raises `HistoryGoneError` where retention took it."""
        page, _ = await self.direct_get(stream, {"seq": seq})
        for message in page:
            headers = dict(message.headers or {})
            return Recorded(await self.read(message.data), stream, seq, headers["Nats-Subject"], headers)
        raise HistoryGoneError(f"message {seq} of {stream}")

    async def direct_get(self, stream: str, request: dict[str, Any]) -> tuple[list[Msg], bool]:
        """The server's batched direct get (NATS ADR-31): messages, and whether there are more."""
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
                if status == "404":
                    return out, False
                if status is not None:
                    raise BrokerError(f"direct get from {stream}: {status} {headers.get('Description', '')}")
                out.append(message)
                if not batched:
                    return out, False
        except nats.errors.TimeoutError as error:
            raise BrokerUnavailableError(f"{stream} did not answer a read: is the NATS server up?") from error
        finally:
            await sub.unsubscribe()

    async def get_object(self, bucket: str, name: str) -> bytes:
        """The object's bytes, digest checked; raises `HistoryGoneError` where it is not there."""
        return await objects.get(self, bucket, name)
