"""A durable consumer in use: deliveries that are held, kept alive, acknowledged or given back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from pipeline import crash, streams
from pipeline.backoff import Backoff
from pipeline.errors import BrokerError
from pipeline.events import AnyEvent
from pipeline.log import retry
from pipeline.log.messages import Place, Recorded, parse_ack_subject
from pipeline.log.stream_reader import StreamReader
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.consumer")


@dataclass(eq=False)
class Delivery(Recorded[AnyEvent]):
    """An event that a consumer holds until it acknowledges it or gives it back."""

    deliveries: int = 1
    pending: int = 0
    """How many more messages wait for the consumer after this one."""
    _msg: Msg | None = None
    _held: set[Delivery] | None = None
    _reader: StreamReader | None = None
    _connection: int = 0
    """How often the client had reconnected when this was delivered."""

    @property
    def place(self) -> Place:
        return parse_ack_subject(self._msg.reply)[1] if self._msg is not None else super().place

    async def ack(self, *, confirmed: bool = False) -> None:
        """Acknowledge it. With `confirmed`, wait until the server knows; without, a lost acknowledgement leads to
        redelivery."""
        assert self._msg is not None
        crash.point("broker.before_ack")
        if not await self._is_on_log():
            log.warning("not acknowledged: the log lost the message", stream=self.stream, seq=self.seq)
        elif confirmed:
            await self._msg.ack_sync()
        else:
            await self._msg.ack()
        self._release()
        crash.point("broker.after_ack")

    async def nak(self, delay_s: float | None = None) -> None:
        """Give it back for another try."""
        assert self._msg is not None
        await self._msg.nak(delay=delay_s)
        self._release()

    async def _is_on_log(self) -> bool:
        """An acknowledgement names a sequence. If the server restarted without the end of its log, as after a power
        cut, the acknowledgement would be another message's, and no consumer would get that message."""
        reader = self._reader
        if reader is None or reader.client.stats["reconnects"] == self._connection:
            return True
        return await reader.holds(self.stream, self.place)

    def _release(self) -> None:
        if self._held is not None:
            self._held.discard(self)


class Consumption:
    """A durable consumer in use; made by `Broker.consume`."""

    def __init__(
        self,
        reader: StreamReader,
        spec: streams.ConsumerSpec,
        sub: JetStreamContext.PullSubscription,
        admit: Callable[[Msg, streams.ConsumerSpec], Awaitable[Delivery | None]],
    ) -> None:
        """`admit` makes a delivery of a message, or deals with the message and returns None."""
        self._reader, self.spec, self._sub, self._admit = reader, spec, sub, admit
        self.held: set[Delivery] = set()
        self._backoff = Backoff()

    async def batch(self, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        """Return up to `limit` deliveries. The list is empty if none came within `wait_s` seconds or the log is
        unavailable.

        A cluster that elects a new leader for the consumer refuses requests for some seconds: the next calls ask
        again, with growing pauses. Raises `BrokerError` if the consumer was deleted."""
        try:
            messages = await self._sub.fetch(limit, timeout=wait_s)
        except (TimeoutError, nats.js.errors.FetchTimeoutError):  # nats-py raises its own and asyncio's
            return []
        except nats.errors.Error as error:
            await self._wait_for_leader(error)
            return []
        self._backoff.reset()
        connection = self._reader.client.stats["reconnects"]
        out = []
        for message in messages:
            delivery = await self._admit(message, self.spec)
            if delivery is not None:
                delivery._held = self.held
                delivery._reader, delivery._connection = self._reader, connection
                self.held.add(delivery)
                out.append(delivery)
        return out

    async def _wait_for_leader(self, error: nats.errors.Error) -> None:
        try:
            await self._reader.js.consumer_info(self.spec.stream, self.spec.name)
        except nats.js.errors.NotFoundError:
            raise BrokerError(
                f"stream {self.spec.stream} has no consumer {self.spec.name} any more: if someone deleted the stream, "
                "start the service again, which creates both"
            ) from error
        except nats.errors.Error as unavailable:
            error = unavailable
        if not retry.is_retryable(error):
            raise BrokerError(f"consumer {self.spec.name}: {retry.reason(error)}") from error
        log.warning("consumer unavailable", consumer=self.spec.name, error=retry.reason(error))
        await self._backoff.wait()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            for delivery in await self.batch(256):
                yield delivery

    async def keep_alive(self) -> None:
        """Tell the server regularly, until cancelled, that the held deliveries are in work, so that it does not
        redeliver them."""
        while True:
            await anyio.sleep(self.spec.ack_wait_s / 3)
            for delivery in list(self.held):
                assert delivery._msg is not None
                try:
                    await delivery._msg.in_progress()
                except nats.errors.Error as error:
                    if not retry.is_retryable(error):
                        raise
                    # The server redelivers the message then, as after a death; the holder recognises it.
                    log.warning(
                        "deliveries not kept alive", consumer=self.spec.name, error=retry.reason(error)
                    )
                    break
