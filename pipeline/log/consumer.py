"""Consumers of the log: what the server delivers, held, kept alive, acknowledged or given back.

`Consumption` adds to the messages that arrive (`pipeline.log.pulling`) what services need: decoded events, dead
letters, deliveries that are kept alive.

One message must not end a service again and again while all others wait. A message that is delivered again may have
ended the process that held it, so it is handed out alone: until it is acknowledged or given back, but at most for
`ALONE_S`, its consumer hands out nothing else. If the process dies in that time, by an exception or an exit, the log
knows which message it was (`pipeline.log.deaths`). An exception of a handler (`handling`) is counted
whenever it comes. A message that has ended its process `ConsumerSpec.max_deaths` times becomes a dead letter.

The trainer holds hundreds of groups until their steps are committed, so nobody knows by the log which of them ended it.
It finds that out itself (`trainer.learner.Learner.untrainable_alone`); its consumer counts no deaths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from pipeline import crash, streams
from pipeline.concurrency.backoff import Backoff
from pipeline.config import ConfigError
from pipeline.errors import BrokerError, leaves
from pipeline.events import AnyEvent
from pipeline.log import retry
from pipeline.log.deaths import Deaths
from pipeline.log.fast_client import FastClient, Pulled
from pipeline.log.messages import LogEntry, parse_ack_subject
from pipeline.log.pulling import ConsumerGoneError, Puller
from pipeline.log.stream_reader import StreamReader
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.log.consumer")

ALONE_S = 1.0
"""Longest time that a message which was delivered again is handled alone. A judge may score a group for longer."""
_GIVING_BACK_S = 1.0
"""Longest time to give deliveries back after the caller's time is over. They go into the client's buffer."""
_TOGETHER_S = 0.01
"""A batch ends when no message came for this long. The server sends what it has at once."""


async def keep_alive(client: FastClient, spec: streams.ConsumerSpec, replies: Callable[[], Iterable[str]]) -> None:
    """Tell the server regularly, until cancelled, that deliveries are in work, so that it does not redeliver them.
    `replies` returns their reply subjects."""
    while True:
        await anyio.sleep(spec.ack_wait_s / 3)
        try:
            for reply in list(replies()):
                await client.publish(reply, Msg.Ack.Progress)
        except nats.errors.Error as error:
            if not retry.is_retryable(error):
                raise
            # The server redelivers the messages then, as after a death; the holder recognises them.
            logger.warning("deliveries not kept alive", consumer=spec.name, error=retry.reason(error))


async def require_consumer(reader: StreamReader, spec: streams.ConsumerSpec, gone: ConsumerGoneError) -> None:
    """Find out why pulling `spec` failed with `gone`. Raises `BrokerError` if the consumer does not exist any more, or
    may not be asked about; else logs that its server is away, or elects a leader."""
    why = str(gone)
    try:
        await reader.js.consumer_info(spec.stream, spec.name)
    except nats.js.errors.NotFoundError:
        raise BrokerError(
            f"stream {spec.stream} has no consumer {spec.name} any more: if someone deleted the stream, "
            "start the service again, which creates both"
        ) from gone
    except nats.errors.Error as error:
        why = retry.reason(error)
        if not retry.is_retryable(error):
            raise BrokerError(f"consumer {spec.name}: {why}") from error
    logger.warning("consumer unavailable", consumer=spec.name, error=why)


@dataclass(eq=False, kw_only=True)
class Delivery(LogEntry[AnyEvent]):
    """An event that a consumer holds until it acknowledges it or gives it back."""

    deliveries: int
    message: Pulled
    consumption: Consumption
    reconnects: int
    """How often the client had reconnected when this was delivered, or earlier."""

    @property
    def reply(self) -> str:
        """The subject on which it is acknowledged."""
        return self.message.reply

    async def ack(self, *, confirmed: bool = False) -> None:
        """Acknowledge it. With `confirmed`, wait until the server knows; without, a lost acknowledgement leads to
        redelivery."""
        client = self.consumption.reader.client
        crash.point("broker.before_ack")
        if not await self._is_on_log():
            logger.warning("not acknowledged: the log lost the message", stream=self.stream, seq=self.seq)
        elif confirmed:
            await client.request(self.reply, Msg.Ack.Ack, timeout=1)
        else:
            await client.publish(self.reply)
        self.consumption.settle(self)
        crash.point("broker.after_ack")

    async def give_back(self, delay_s: float) -> None:
        """Let the server deliver it again, to any process, after `delay_s` seconds."""
        delay = msgspec.json.encode({"delay": int(delay_s * 1e9)})
        await self.consumption.reader.client.publish(self.reply, Msg.Ack.Nak + b" " + delay)
        self.consumption.settle(self)

    async def _is_on_log(self) -> bool:
        """Return whether the log still holds the message that was delivered. The server is asked only if the connection
        broke since."""
        # An acknowledgement names a sequence. If the server restarted without the end of its log, as after a power cut,
        # it would acknowledge another message, and no consumer would get that one.
        reader = self.consumption.reader
        if reader.client.stats["reconnects"] == self.reconnects:
            return True
        return await reader.holds(self.stream, self.place)


@dataclass
class _HandledAlone:
    """A delivery that is handled alone, because it may have ended the process that held it before."""

    delivery: Delivery
    deaths: int
    """How often it had ended its process before."""
    settled: anyio.Event = field(default_factory=anyio.Event)


class Consumption:
    """A durable consumer in use; made by `Broker.consume`."""

    def __init__(
        self,
        reader: StreamReader,
        spec: streams.ConsumerSpec,
        puller: Puller,
        admit: Callable[[Pulled, streams.ConsumerSpec], Awaitable[AnyEvent | None]],
        reject: Callable[[Pulled, streams.ConsumerSpec, str, str], Awaitable[None]],
    ) -> None:
        """`admit` returns the event in a message, or deals with the message and returns None. `reject` makes a message
        a dead letter, with a reason and its detail."""
        self.reader, self.spec, self._puller, self._admit = reader, spec, puller, admit
        self._reject, self._deaths = reject, Deaths(reader, spec)
        self._redelivered: deque[tuple[Pulled, int]] = deque()
        """Messages that wait until they are handled alone, each with the number of the client's reconnections when it
        came: an acknowledgement after a further one could be for another message (`Delivery`)."""
        self._alone: _HandledAlone | None = None
        self._failed: set[Delivery] = set()
        """Deliveries whose handler raised, until they are settled: `close` counts a death for each."""
        self.unsettled: set[Delivery] = set()
        self._backoff = Backoff()
        """Pauses between pulls while a cluster elects the consumer's leader."""

    async def batch(self, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        """Return up to `limit` deliveries. The list is empty if none came within `wait_s` seconds or the log is
        unavailable.

        A cluster that elects a new leader for the consumer refuses requests for some seconds: the next calls ask
        again, with growing pauses. Raises `BrokerError` if the consumer was deleted."""
        if self._alone is not None:  # nothing else is handed out while a message is handled alone
            with anyio.move_on_after(ALONE_S):
                await self._alone.settled.wait()
            await self._end_handling_alone()
        if self._redelivered:
            return await self._hand_out_alone()
        out: list[Delivery] = []
        left = limit
        while left:
            try:
                messages = await self._puller.take(left, _TOGETHER_S if left < limit else wait_s)
            except ConsumerGoneError as gone:
                await require_consumer(self.reader, self.spec, gone)
                await self._backoff.wait()
                break
            if not messages:
                break
            left -= len(messages)
            self._backoff.reset()
            reconnects = self._puller.reconnects
            for message in messages:
                if self.spec.max_deaths and parse_ack_subject(message.reply)[0] > 1:
                    self._redelivered.append((message, reconnects))
                    continue
                event = await self._admit(message, self.spec)
                if event is not None:
                    out.append(self._hold(event, message, reconnects))
        return out or await self._hand_out_alone()

    async def _hand_out_alone(self) -> list[Delivery]:
        """Return the next message that was delivered before, as a list of one, to be handled alone; an empty list if
        there is none. One that has ended its process too often becomes a dead letter.

        A death is counted in advance, because a process that is killed can't count it; `_end_handling_alone` takes it
        back."""
        while self._redelivered:
            (message, reconnects), spec = self._redelivered.popleft(), self.spec
            place = parse_ack_subject(message.reply)[1]
            deaths = await self._deaths.count(spec.stream, place)
            if deaths >= spec.max_deaths:
                why = f"{spec.name} ended {deaths} times while it handled this message"
                await self._reject(message, spec, "ended_service", why)
                continue
            event = await self._admit(message, spec)
            if event is None:
                continue
            await self._deaths.record(spec.stream, place, deaths + 1)
            delivery = self._hold(event, message, reconnects)
            self._alone = _HandledAlone(delivery, deaths)
            return [delivery]
        return []

    async def _end_handling_alone(self) -> None:
        """Let other messages be handled beside the one that was handled alone, and take back the death that
        `_hand_out_alone` has counted for that one in advance."""
        assert self._alone is not None
        delivery, deaths_before = self._alone.delivery, self._alone.deaths
        self._alone = None
        await self._deaths.record(delivery.stream, delivery.place, deaths_before)

    def settle(self, delivery: Delivery) -> None:
        """Forget a delivery that was acknowledged or given back."""
        self.unsettled.discard(delivery)
        self._failed.discard(delivery)
        if self._alone is not None and self._alone.delivery is delivery:
            self._alone.settled.set()

    def note_failure(self, delivery: Delivery) -> None:
        """Remember that the handler of a delivery raised. If the exception ends this process, `close` counts a death of
        that message."""
        if self.spec.max_deaths and delivery in self.unsettled:
            self._failed.add(delivery)

    async def close(self, failure: BaseException | None) -> None:
        """Let the server deliver at once what is still held. Call it shielded from cancellation, with a time limit.

        `failure`: the exception that ends the process, if any. If it is the service's own fault (`is_own_fault`), it
        counts as a death by the deliveries whose handler raised, or by the one that is handled alone if none raised."""
        own_fault = failure is not None and is_own_fault(failure)
        at_fault = self._failed if own_fault else set()
        try:
            if self._alone is not None:
                if own_fault and not at_fault:
                    at_fault = {self._alone.delivery}
                await self._end_handling_alone()
            for delivery in at_fault:
                deaths = await self._deaths.count(delivery.stream, delivery.place)
                await self._deaths.record(delivery.stream, delivery.place, deaths + 1)
        finally:
            # Deliveries are given back after the deaths are recorded, because their next process reads these. They are
            # given back too if the deaths can't be recorded, or not in time: the bucket may be away, the stream not.
            with anyio.move_on_after(_GIVING_BACK_S, shield=True):
                for reply in self.replies():
                    await self.reader.client.publish(reply, Msg.Ack.Nak)

    def _hold(self, event: AnyEvent, message: Pulled, reconnects: int) -> Delivery:
        """Return a delivery, which is kept alive from now on (`replies`) until it is settled."""
        deliveries, place = parse_ack_subject(message.reply)
        delivery = Delivery(
            event,
            self.spec.stream,
            place,
            message.subject,
            message.headers,
            deliveries=deliveries,
            message=message,
            consumption=self,
            reconnects=reconnects,
        )
        self.unsettled.add(delivery)
        return delivery

    def replies(self) -> list[str]:
        """Return the reply subjects of everything that was delivered and not acknowledged."""
        messages = (*(message for message, _ in self._redelivered), *self._puller.arrived)
        return [delivery.reply for delivery in self.unsettled] + [message.reply for message in messages]


@contextmanager
def handling(deliveries: Iterable[Delivery]) -> Iterator[None]:
    """Handle `deliveries` in the block. An exception that leaves it and ends the process counts as a death by them
    (`Consumption.close`)."""
    try:
        yield
    except Exception:
        for delivery in deliveries:
            delivery.consumption.note_failure(delivery)
        raise


def is_own_fault(error: BaseException) -> bool:
    """Return whether `error`, with which a service ends, is a fault of the service's own code: it holds an exception
    that is no cancellation and is not about the log or a setting."""
    outside_causes = BrokerError | ConfigError | nats.errors.Error
    return any(isinstance(e, Exception) and not isinstance(e, outside_causes) for e in leaves(error))
