"""Bring the messages of consumers in bulk, without nats-py's wait for each. Request and status messages: NATS ADR-13
and ADR-37.

One request of a consumer is open at a time. Messages that arrived stay with the puller when a wait is cancelled, so a
service that stops still has everything that it was given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipeline.log.fast_client import FastClient, Pulled

_EXPIRES_S = 2.0
"""Time after which the server ends a request that it could not fill."""
_MAX_BYTES = 16 * 1024 * 1024
"""Bytes of messages after which the server ends a request, unless two of the largest messages take more."""


class ConsumerGoneError(Exception):
    """The consumer, or its stream, was deleted, or does not answer."""


class Puller:
    """Pulls one consumer; made by `pulling`."""

    def __init__(self, client: FastClient, stream: str, consumer: str, inbox: str, ahead: int) -> None:
        """`inbox`: what the reply subjects of requests begin with. `ahead`: as in `pulling`."""
        self._client, self._inbox, self._ahead = client, inbox, ahead
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._arrival = anyio.Event()
        """Set when a message or the end of a request has come."""
        self._outstanding = 0
        """Messages that the open request may still bring."""
        self._requested_at = 0.0
        self._requests = 0
        self._reply = ""
        """Reply subject of the newest request."""
        self.gone = ""
        """Why the consumer is gone; empty if it is there."""
        self.arrived: deque[Pulled] = deque()
        """Messages that nobody took yet."""
        self.reconnects = 0
        """How often the client had reconnected when a message last arrived while none waited; the messages of the last
        `take` arrived after that. If it has reconnected since, the server may be one that lost the end of its log."""
        self.subscription: Subscription | None = None

    async def close(self) -> None:
        """Unsubscribe, so that no more messages come. Do it before messages are given back: otherwise the server would
        deliver them to the request of this puller that is still open."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    def on_delivery(self, message: Pulled) -> None:
        """Add a message to `arrived`, and wake `take`. The client calls it as the socket delivers the bytes."""
        if not self.arrived:
            self.reconnects = self._client.stats["reconnects"]
        self.arrived.append(message)
        self._outstanding -= 1
        if len(self.arrived) == 1 or self._outstanding <= 0:
            self._arrival.set()

    async def on_message(self, message: Msg) -> None:
        """Handle what came through nats-py: mostly the status with which the server ends a request, seldom a
        delivery."""
        if message.reply:
            self.on_delivery(Pulled.from_message(message))
            return
        if message.subject != self._reply:
            return  # of an earlier request: the server reports a full batch after the batch
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status in ("404", "408", "409", "503"):
            self._outstanding = 0  # the request is over: nothing there, expired, or full by bytes
            if "Deleted" in text:
                self.gone = text
            elif status == "503":
                self.gone = "no server answers for it"
            self._arrival.set()

    async def request(self, size: int, expires_s: float) -> None:
        """Ask the server for `size` messages, unless a request is open or so many wait to be taken. The server ends the
        request after `expires_s` seconds. Sets `gone` if an open request is overdue."""
        now = time.monotonic()
        if self._outstanding > 0:
            if now - self._requested_at >= _EXPIRES_S + 1:
                # Its time is over without the status that ends a request: the server died, or there is no consumer.
                self._outstanding, self.gone = 0, "it does not answer"
            return
        if len(self.arrived) >= size:
            return  # bounds memory: the caller has to take these first
        self._outstanding, self._requested_at = size, now
        self._requests += 1
        self._reply = f"{self._inbox}.{self._requests}"
        request = {
            "batch": size,
            "expires": int(expires_s * 1e9),
            "max_bytes": max(_MAX_BYTES, 2 * self._client.max_payload),
        }
        await self._client.publish(self._subject, msgspec.json.encode(request), reply=self._reply)

    async def take(self, limit: int, wait_s: float) -> list[Pulled]:
        """Return up to `limit` messages; none if none came within `wait_s` seconds. Raises `ConsumerGoneError`."""
        size, expires_s = self._ahead or limit, _EXPIRES_S if self._ahead else min(_EXPIRES_S, wait_s)
        with anyio.move_on_after(wait_s):
            while not self.arrived:
                if self.gone:
                    gone, self.gone = self.gone, ""
                    raise ConsumerGoneError(gone)
                self._arrival = anyio.Event()
                if self._client.is_connected:
                    await self.request(size, expires_s)
                if not self.gone:
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._arrival.wait()
        taken = self.take_nowait(limit)
        if self._ahead and self._client.is_connected:
            try:
                await self.request(size, expires_s)
            except BaseException:  # also a cancellation: the caller gets nothing then
                self.arrived.extendleft(reversed(taken))
                raise
        return taken

    def take_nowait(self, limit: int = 2**31) -> list[Pulled]:
        """Return up to `limit` messages that came already."""
        arrived = self.arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]


@asynccontextmanager
async def pulling(client: FastClient, stream: str, consumer: str, *, ahead: int = 0) -> AsyncIterator[Puller]:
    """Pull a consumer, in requests of up to 16 MiB. `ahead`: how many messages each request asks for, also before the
    next `take`; 0: each `take` asks for what it wants."""
    inbox = client.new_inbox()
    puller = Puller(client, stream, consumer, inbox, ahead)
    subscription = await client.subscribe(
        f"{inbox}.*", cb=puller.on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
    )
    puller.subscription = subscription
    with client.pulled_messages(subscription, puller.on_delivery):
        try:
            yield puller
        finally:
            await puller.close()
