"""Messages of a durable consumer in bulk, without nats-py's wait per message.

What comes is collected where it arrives (`pipeline.log.deliveries`); one request is open at a time, bounded in messages and bytes, and the next is sent when it is
filled. What has come stays here when a wait is cancelled, so that a stopping service loses nothing it was given.
Request and status messages: NATS ADR-13 and ADR-37.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from pipeline import streams
from pipeline.log.deliveries import Pulled, Splitter, subscription_id

_EXPIRES_S = 2.0
_BYTES = 16 * 1024 * 1024


class ConsumerGoneError(Exception):
    """The consumer, or its stream, was deleted."""


class Puller:
    """Make it with `pulling`."""

    def __init__(self, client: Client, spec: streams.ConsumerSpec, inbox: str, batch: int) -> None:
        self._client, self.spec, self._inbox, self._batch = client, spec, inbox, batch
        self._arrived: deque[Pulled] = deque()
        self._news = anyio.Event()
        self._open = 0
        """Messages that the open request may still bring."""
        self._asked_at = 0.0
        self._asked = 0
        self._request = ""
        """Reply subject of the newest request."""
        self._gone = ""

    def _on_delivery(self, message: Pulled) -> None:
        self._arrived.append(message)
        self._open -= 1
        if len(self._arrived) == 1 or self._open <= 0:
            self._news.set()

    async def _on_message(self, message: Msg) -> None:
        """What came through nats-py: a word on the request, or a delivery without headers."""
        if message.reply:
            self._on_delivery(Pulled.of(message))
            return
        if message.subject != self._request:
            return  # on one that is over: a batch that was filled is said to be so after it was filled
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status in ("404", "408", "409"):
            self._open = 0  # the request is over: nothing there, too late, or full by bytes
            if "Deleted" in text:
                self._gone = text
            self._news.set()
        elif status == "503":
            self._open = 0
            self._gone = "nobody answers for it"
            self._news.set()

    async def _ask(self) -> None:
        now = time.monotonic()
        if self._open > 0:
            if now - self._asked_at >= _EXPIRES_S + 1:
                # Neither messages nor a word on the request: the server died with it, or there is no consumer to answer.
                self._open, self._gone = 0, "it does not answer"
            return
        if len(self._arrived) >= self._batch:
            return  # bounds memory: first these have to be taken
        self._open, self._asked_at = self._batch, now
        self._asked += 1
        self._request = f"{self._inbox}.{self._asked}"
        request = {
            "batch": self._batch,
            "expires": int(_EXPIRES_S * 1e9),
            "max_bytes": max(_BYTES, 2 * self._client.max_payload),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.spec.stream}.{self.spec.name}"
        await self._client.publish(subject, msgspec.json.encode(request), reply=self._request)

    async def take(self, limit: int, wait_s: float) -> list[Pulled]:
        """Up to `limit` messages; an empty list where none came within `wait_s`. Raises `ConsumerGoneError`."""
        with anyio.move_on_after(wait_s):
            while not self._arrived:
                if self._gone:
                    gone, self._gone = self._gone, ""
                    raise ConsumerGoneError(gone)
                self._news = anyio.Event()
                if self._client.is_connected:
                    await self._ask()
                if not self._gone:
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._news.wait()
        taken = self.take_nowait(limit)
        if self._client.is_connected:
            await self._ask()
        return taken

    def take_nowait(self, limit: int = 2**31) -> list[Pulled]:
        """What has come already."""
        arrived = self._arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]


@asynccontextmanager
async def pulling(client: Client, spec: streams.ConsumerSpec, batch: int = 2_000) -> AsyncIterator[Puller]:
    """The durable `spec`, pulled in requests of up to `batch` messages and 16 MiB."""
    inbox = client.new_inbox()
    puller = Puller(client, spec, inbox, batch)
    sub = await client.subscribe(
        f"{inbox}.*", cb=puller._on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
    )
    splitter = Splitter.of(client)
    splitter.hand(subscription_id(sub), puller._on_delivery)
    try:
        yield puller
    finally:
        splitter.forget(subscription_id(sub))
        if not client.is_closed:
            await sub.unsubscribe()
