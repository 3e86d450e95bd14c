"""Bring the messages of consumers in bulk, without nats-py's wait for each. Request and status messages: NATS ADR-13
and ADR-37.

One request of a consumer is open at a time. Messages that arrived stay with the puller when a wait is cancelled, so a
service that stops still has everything that it was given. `Pullers` does the same for the partitions of a stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipeline import streams
from pipeline.log.fast_client import FastClient, Pulled

_EXPIRES_S = 2.0
_BYTES = 16 * 1024 * 1024


class ConsumerGoneError(Exception):
    """The consumer, or its stream, was deleted, or does not answer. `number` is that of its partition."""

    def __init__(self, why: str, number: int = 0) -> None:
        super().__init__(why)
        self.number = number


class _Wakeup:
    """An event that can be set again; pullers that are waited for together share one."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class Puller:
    """Made by `pulling`."""

    def __init__(
        self,
        client: FastClient,
        stream: str,
        consumer: str,
        inbox: str,
        ahead: int,
        wakeup: _Wakeup | None = None,
    ) -> None:
        self._client, self._inbox, self._ahead = client, inbox, ahead
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._wakeup = wakeup or _Wakeup()
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
        """How often the client had reconnected when the oldest message of the last `take` arrived, or earlier."""
        self.subscription: Subscription | None = None

    async def close(self) -> None:
        """Take no more messages. The server would deliver what is given back to a request that is still open."""
        subscription, self.subscription = self.subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    def on_delivery(self, message: Pulled) -> None:
        if not self.arrived:
            self.reconnects = self._client.stats["reconnects"]
        self.arrived.append(message)
        self._outstanding -= 1
        if len(self.arrived) == 1 or self._outstanding <= 0:
            self._wakeup.set()

    async def on_message(self, message: Msg) -> None:
        """Take what came through nats-py: the status of a request, seldom a delivery."""
        if message.reply:
            self.on_delivery(Pulled.of(message))
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
            self._wakeup.set()

    async def request(self, size: int, expires_s: float) -> None:
        """Ask for `size` messages, unless a request is open or so many wait to be taken."""
        now = time.monotonic()
        if self._outstanding > 0:
            if now - self._requested_at >= _EXPIRES_S + 1:
                # Neither messages nor a status: the server died with the request, or the consumer does not exist.
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
            "max_bytes": max(_BYTES, 2 * self._client.max_payload),
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
                self._wakeup.clear()
                if self._client.is_connected:
                    await self.request(size, expires_s)
                if not self.gone:
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._wakeup.wait()
        taken = self.take_nowait(limit)
        if self._ahead and self._client.is_connected:
            await self.request(size, expires_s)
        return taken

    def take_nowait(self, limit: int = 2**31) -> list[Pulled]:
        """Return up to `limit` messages that came already."""
        arrived = self.arrived
        return [arrived.popleft() for _ in range(min(limit, len(arrived)))]


class Pullers:
    """The pullers of the partitions of one consumer, as one. A `take` asks every partition for its share."""

    def __init__(self, client: FastClient, pullers: Sequence[Puller], wakeup: _Wakeup) -> None:
        self._client, self._pullers, self._wakeup = client, pullers, wakeup
        self._first = 0
        """The partition whose messages the next `take` takes first."""
        self.reconnects = 0

    @property
    def arrived(self) -> list[Pulled]:
        return [message for puller in self._pullers for message in puller.arrived]

    async def close(self) -> None:
        """As `Puller.close`."""
        for puller in self._pullers:
            await puller.close()

    async def take(self, limit: int, wait_s: float) -> list[Pulled]:
        """As `Puller.take`. Raises `ConsumerGoneError` for a partition only if no other one has messages."""
        share, expires_s = max(1, limit // len(self._pullers)), min(_EXPIRES_S, wait_s)
        with anyio.move_on_after(wait_s):
            while not any(puller.arrived for puller in self._pullers):
                for number, puller in enumerate(self._pullers):
                    if puller.gone:
                        gone, puller.gone = puller.gone, ""
                        raise ConsumerGoneError(gone, number)
                self._wakeup.clear()
                if self._client.is_connected:
                    for puller in self._pullers:
                        await puller.request(share, expires_s)
                if not any(puller.gone for puller in self._pullers):
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._wakeup.wait()
        return self._taken(limit)

    def _taken(self, limit: int) -> list[Pulled]:
        taken: list[Pulled] = []
        reconnects = self._client.stats["reconnects"]
        for i in range(len(self._pullers)):
            puller = self._pullers[(self._first + i) % len(self._pullers)]
            if puller.arrived and len(taken) < limit:
                reconnects = min(reconnects, puller.reconnects)
                taken += puller.take_nowait(limit - len(taken))
        self._first = (self._first + 1) % len(self._pullers)
        self.reconnects = reconnects
        return taken


@asynccontextmanager
async def pulling_all(
    client: FastClient, specs: Sequence[streams.ConsumerSpec]
) -> AsyncIterator[Puller | Pullers]:
    """Pull the consumers of all partitions of a stream as one."""
    if len(specs) == 1:
        async with pulling(client, specs[0].stream, specs[0].durable) as puller:
            yield puller
        return
    wakeup = _Wakeup()
    async with AsyncExitStack() as stack:
        pullers = [
            await stack.enter_async_context(pulling(client, spec.stream, spec.durable, wakeup=wakeup))
            for spec in specs
        ]
        yield Pullers(client, pullers, wakeup)


@asynccontextmanager
async def pulling(
    client: FastClient, stream: str, consumer: str, *, ahead: int = 0, wakeup: _Wakeup | None = None
) -> AsyncIterator[Puller]:
    """Pull a consumer, in requests of up to 16 MiB. `ahead`: how many messages each request asks for, also before the
    next `take`; 0: each `take` asks for what it wants. `wakeup`: the event that several pullers share."""
    inbox = client.new_inbox()
    puller = Puller(client, stream, consumer, inbox, ahead, wakeup)
    subscription = await client.subscribe(
        f"{inbox}.*", cb=puller.on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
    )
    puller.subscription = subscription
    with client.pulled_messages(subscription, puller.on_delivery):
        try:
            yield puller
        finally:
            await puller.close()
