"""Consumers of the log: what the server delivers, held, kept alive, acknowledged or given back.

`Puller` brings messages in bulk, without nats-py's wait for each. One request is open at a time. Messages that arrived
stay with it when a wait is cancelled, so a service that stops still has everything it was given. `Consumption` adds
what services need: decoded events, dead letters, deliveries that are kept alive. Request and status messages: NATS
ADR-13 and ADR-37.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from pipeline import crash, streams
from pipeline.backoff import Backoff
from pipeline.errors import BrokerError
from pipeline.events import AnyEvent
from pipeline.log import retry
from pipeline.log.fast_client import FastClient, Pulled
from pipeline.log.messages import Place, Recorded, parse_ack_subject
from pipeline.log.stream_reader import StreamReader
from pipeline.telemetry import counts
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.consumer")

_EXPIRES_S = 2.0
_BYTES = 16 * 1024 * 1024
_TOGETHER_S = 0.01
"""A batch ends when no message came for this long. The server sends what it has at once."""


class ConsumerGoneError(Exception):
    """The consumer, or its stream, was deleted, or does not answer."""


class Puller:
    """Made by `pulling`."""

    def __init__(self, client: FastClient, stream: str, consumer: str, inbox: str, ahead: int) -> None:
        self._client, self._inbox, self._ahead = client, inbox, ahead
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._news = anyio.Event()
        self._outstanding = 0
        """Messages that the open request may still bring."""
        self._requested_at = 0.0
        self._requests = 0
        self._reply = ""
        """Reply subject of the newest request."""
        self._gone = ""
        self.arrived: deque[Pulled] = deque()
        """Messages that nobody took yet."""
        self.reconnects = 0
        """How often the client had reconnected when the oldest message of the last `take` arrived, or earlier."""

    def on_delivery(self, message: Pulled) -> None:
        if not self.arrived:
            self.reconnects = self._client.stats["reconnects"]
        self.arrived.append(message)
        self._outstanding -= 1
        if len(self.arrived) == 1 or self._outstanding <= 0:
            self._news.set()

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
                self._gone = text
            elif status == "503":
                self._gone = "no server answers for it"
            self._news.set()

    async def _request(self, size: int, expires_s: float) -> None:
        now = time.monotonic()
        if self._outstanding > 0:
            if now - self._requested_at >= _EXPIRES_S + 1:
                # Neither messages nor a status: the server died with the request, or the consumer does not exist.
                self._outstanding, self._gone = 0, "it does not answer"
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
                if self._gone:
                    gone, self._gone = self._gone, ""
                    raise ConsumerGoneError(gone)
                self._news = anyio.Event()
                if self._client.is_connected:
                    await self._request(size, expires_s)
                if not self._gone:
                    with anyio.move_on_after(_EXPIRES_S):
                        await self._news.wait()
        taken = self.take_nowait(limit)
        if self._ahead and self._client.is_connected:
            await self._request(size, expires_s)
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
    with client.pulled_messages(subscription, puller.on_delivery):
        try:
            yield puller
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()


async def keep_alive(
    client: FastClient, spec: streams.ConsumerSpec, held: Callable[[], Iterable[str]]
) -> None:
    """Tell the server regularly, until cancelled, that deliveries are in work, so that it does not redeliver them.
    `held` returns their reply subjects."""
    while True:
        await anyio.sleep(spec.ack_wait_s / 3)
        try:
            for reply in list(held()):
                await client.publish(reply, Msg.Ack.Progress)
        except nats.errors.Error as error:
            if not retry.is_retryable(error):
                raise
            # The server redelivers the messages then, as after a death; the holder recognises them.
            log.warning("deliveries not kept alive", consumer=spec.name, error=retry.reason(error))


@dataclass(eq=False)
class Delivery(Recorded[AnyEvent]):
    """An event that a consumer holds until it acknowledges it or gives it back."""

    deliveries: int = 1
    pending: int = 0
    """How many more messages wait for the consumer after this one."""
    _message: Pulled | None = None
    _consumption: Consumption | None = None
    _reconnects: int = 0
    """How often the client had reconnected when this was delivered, or earlier."""

    @property
    def reply(self) -> str:
        """The subject on which it is acknowledged."""
        assert self._message is not None
        return self._message.reply

    @property
    def place(self) -> Place:
        return parse_ack_subject(self.reply)[1] if self._message is not None else super().place

    async def ack(self, *, confirmed: bool = False) -> None:
        """Acknowledge it. With `confirmed`, wait until the server knows; without, a lost acknowledgement leads to
        redelivery."""
        assert self._consumption is not None
        client = self._consumption.reader.client
        crash.point("broker.before_ack")
        if not await self._is_on_log():
            log.warning("not acknowledged: the log lost the message", stream=self.stream, seq=self.seq)
        elif confirmed:
            await client.request(self.reply, Msg.Ack.Ack, timeout=1)
        else:
            await client.publish(self.reply)
        self._consumption.held.discard(self)
        counts.done[self._consumption.spec.name] += 1
        crash.point("broker.after_ack")

    async def give_back(self, delay_s: float) -> None:
        """Let the server deliver it again, to any process, after `delay_s` seconds."""
        assert self._consumption is not None
        delay = msgspec.json.encode({"delay": int(delay_s * 1e9)})
        await self._consumption.reader.client.publish(self.reply, Msg.Ack.Nak + b" " + delay)
        self._consumption.held.discard(self)

    async def _is_on_log(self) -> bool:
        """An acknowledgement names a sequence. If the server restarted without the end of its log, as after a power
        cut, the acknowledgement would be another message's, and no consumer would get that message."""
        assert self._consumption is not None
        reader = self._consumption.reader
        if reader.client.stats["reconnects"] == self._reconnects:
            return True
        return await reader.holds(self.stream, self.place)


class Consumption:
    """A durable consumer in use; made by `Broker.consume`."""

    def __init__(
        self,
        reader: StreamReader,
        spec: streams.ConsumerSpec,
        puller: Puller,
        admit: Callable[[Pulled, streams.ConsumerSpec], Awaitable[AnyEvent | None]],
    ) -> None:
        """`admit` returns the event in a message, or deals with the message and returns None."""
        self.reader, self.spec, self._puller, self._admit = reader, spec, puller, admit
        self.held: set[Delivery] = set()
        self._backoff = Backoff()

    async def batch(self, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        """Return up to `limit` deliveries. The list is empty if none came within `wait_s` seconds or the log is
        unavailable.

        A cluster that elects a new leader for the consumer refuses requests for some seconds: the next calls ask
        again, with growing pauses. Raises `BrokerError` if the consumer was deleted."""
        out: list[Delivery] = []
        left = limit
        while left:
            try:
                messages = await self._puller.take(left, _TOGETHER_S if left < limit else wait_s)
            except ConsumerGoneError as gone:
                await self._wait_for_leader(gone)
                break
            if not messages:
                break
            left -= len(messages)
            self._backoff.reset()
            reconnects = self._puller.reconnects
            for message in messages:
                event = await self._admit(message, self.spec)
                if event is not None:
                    out.append(self._hold(event, message, reconnects))
        return out

    def _hold(self, event: AnyEvent, message: Pulled, reconnects: int) -> Delivery:
        deliveries, place = parse_ack_subject(message.reply)
        pending = int(message.reply.split(".")[-1 if message.reply.count(".") == 8 else -2])
        delivery = Delivery(
            event, self.spec.stream, place.seq, message.subject, message.headers, deliveries, pending, message,
            self, reconnects,
        )  # fmt: skip
        self.held.add(delivery)
        counts.taken[self.spec.name] += 1
        counts.pending[self.spec.name] = pending
        return delivery

    async def _wait_for_leader(self, gone: ConsumerGoneError) -> None:
        """Pause before the next request. Raises `BrokerError` if the consumer does not exist."""
        why = str(gone)
        try:
            await self.reader.js.consumer_info(self.spec.stream, self.spec.name)
        except nats.js.errors.NotFoundError:
            raise BrokerError(
                f"stream {self.spec.stream} has no consumer {self.spec.name} any more: if someone deleted the stream, "
                "start the service again, which creates both"
            ) from gone
        except nats.errors.Error as error:
            why = retry.reason(error)
            if not retry.is_retryable(error):
                raise BrokerError(f"consumer {self.spec.name}: {why}") from error
        log.warning("consumer unavailable", consumer=self.spec.name, error=why)
        await self._backoff.wait()

    def replies(self) -> list[str]:
        """Return the reply subjects of everything that was delivered and not acknowledged."""
        return [delivery.reply for delivery in self.held] + [m.reply for m in self._puller.arrived]

    async def give_back(self) -> None:
        """Let the server deliver at once what is still held."""
        for reply in self.replies():
            await self.reader.client.publish(reply, Msg.Ack.Nak)
