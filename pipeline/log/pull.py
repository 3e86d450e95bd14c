"""Messages of a durable consumer in bulk, without nats-py's wait per message.

One request is open at a time, bounded in messages and bytes; the next is sent when it is filled. Messages that
arrived stay here when a wait is cancelled, so that a service that stops still has everything it was given. Request
and status messages: NATS ADR-13 and ADR-37.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
from nats.aio.msg import Msg

from pipeline import streams
from pipeline.log.fast_client import FastClient, Pulled

_EXPIRES_S = 2.0
_BYTES = 16 * 1024 * 1024


class ConsumerGoneError(Exception):
    """The consumer, or its stream, was deleted, or does not answer."""


class Puller:
    """Made by `pulling`."""

    def __init__(self, client: FastClient, spec: streams.ConsumerSpec, inbox: str, batch: int) -> None:
        self._client, self.spec, self._inbox, self._batch = client, spec, inbox, batch
        self._arrived: deque[Pulled] = deque()
        self._news = anyio.Event()
        self._outstanding = 0
        """Messages that the open request may still bring."""
        self._requested_at = 0.0
        self._requests = 0
        self._reply = ""
        """Reply subject of the newest request."""
        self._gone = ""

    def on_delivery(self, message: Pulled) -> None:
        self._arrived.append(message)
        self._outstanding -= 1
        if len(self._arrived) == 1 or self._outstanding <= 0:
            self._news.set()

    async def on_message(self, message: Msg) -> None:
        """Take what came through nats-py: the status of a request, or a delivery without headers."""
        if message.reply:
            self.on_delivery(Pulled.of(message))
            return
        if message.subject != self._reply:
            return  # of an earlier request: the server reports a full batch after the batch
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status in ("404", "408", "409"):
            self._outstanding = 0  # the request is over: nothing there, expired, or full by bytes
            if "Deleted" in text:
                self._gone = text
            self._news.set()
        elif status == "503":
            self._outstanding = 0
            self._gone = "no server answers for it"
            self._news.set()

    async def _request(self) -> None:
        now = time.monotonic()
        if self._outstanding > 0:
            if now - self._requested_at >= _EXPIRES_S + 1:
                # Neither messages nor a status: the server died with the request, or the consumer does not exist.
                self._outstanding, self._gone = 0, "it does not answer"
            return
        if len(self._arrived) >= self._batch:
            return  # bounds memory: the caller has to take these first
        self._outstanding, self._requested_at = self._batch, now
        self._requests += 1
        self._reply = f"{self._inbox}.{self._requests}"
        request = {
            "batch": self._batch,
            "expires": int(_EXPIRES_S * 1e9),
            "max_bytes": max(_BYTES, 2 * self._client.max_payload),
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.spec.stream}.{self.spec.name}"
        await self._client.publish(subject, msgspec.json.encode(request), reply=self._reply)

    async def take(self, limit: int, wait_s: float) -> list[Pulled]:
        """Return up to `limit` messages; none if none came within `wait_s` seconds. Raises `ConsumerGoneError`."""
        with anyio.move_on_after(wait_s):
            while not self._arrived:
                if self._gone:
                    gone, self._gone = self._gone, ""
                    raise ConsumerGoneError(gone)
                self._news = anyio.Event()
                if self._client.is_connected:
                    await self._request()
                if not self._gone:
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._news.wait()
        taken = self.take_nowait(limit)
        if self._client.is_connected:
            await self._request()
        return taken

    def take_nowait(self, limit: int = 2**31) -> list[Pulled]:
        """Return up to `limit` messages that came already."""
        arrived = self._arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]


@asynccontextmanager
async def pulling(
    client: FastClient, spec: streams.ConsumerSpec, batch: int = 2_000
) -> AsyncIterator[Puller]:
    """Pull the durable consumer `spec` in requests of up to `batch` messages and 16 MiB."""
    inbox = client.new_inbox()
    puller = Puller(client, spec, inbox, batch)
    subscription = await client.subscribe(
        f"{inbox}.*", cb=puller.on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
    )
    with client.pulled_messages(subscription, puller.on_delivery):
        try:
            yield puller
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()
