"""A durable consumer in use: deliveries that are held, kept alive, acknowledged or given back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from pipeline import crash, streams
from pipeline.errors import BrokerError
from pipeline.log import retry
from pipeline.log.history import Recorded
from pipeline.log.place import holds, told
from pipeline.telemetry.logs import get_logger

if TYPE_CHECKING:
    from pipeline.log.broker import Broker

log = get_logger("pipeline.log.consumer")


@dataclass(eq=False)
class Delivery(Recorded):
    """An event that a consumer holds until it says what became of it."""

    deliveries: int = 1
    pending: int = 0
    """How many more the consumer has waiting after this one."""
    _msg: Msg | None = None
    _held: set[Delivery] | None = None
    _broker: Broker | None = None
    _life: int = 0
    """How often the connection had been made anew when this was delivered."""

    @property
    def reply(self) -> str:
        """The subject that answers to this delivery; it holds the place in the stream (`pipeline.log.place`)."""
        return str(self._msg.reply) if self._msg is not None else ""

    async def ack(self, *, confirmed: bool = False) -> None:
        """Done with it. `confirmed` waits until the server knows; without, a lost ack leads to redelivery."""
        assert self._msg is not None
        crash.point("broker.before_ack")
        if not await self._is_there():
            log.warning("not acknowledged: the log lost it", stream=self.stream, seq=self.seq)
        elif confirmed:
            await self._msg.ack_sync()
        else:
            await self._msg.ack()
        self._let_go()
        crash.point("broker.after_ack")

    async def nak(self, delay_s: float | None = None) -> None:
        """Give it back for another try."""
        assert self._msg is not None
        await self._msg.nak(delay=delay_s)
        self._let_go()

    async def _is_there(self) -> bool:
        """An acknowledgement names a number. Where the server came back without the end of its log, as after a power cut, it
        would acknowledge another message, which then nobody would get."""
        broker = self._broker
        if broker is None or broker.client.stats["reconnects"] == self._life:
            return True
        return await holds(broker, self.stream, told(self.reply)[1])

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.discard(self)


class Consumption:
    """A durable consumer in use; see `Broker.consume`."""

    def __init__(
        self, broker: Broker, spec: streams.ConsumerSpec, sub: JetStreamContext.PullSubscription
    ) -> None:
        self._broker, self.spec, self._sub = broker, spec, sub
        self.held: set[Delivery] = set()
        self._pause = retry.Pause()

    async def batch(self, limit: int, wait_s: float = 1.0) -> list[Delivery]:
        """Up to `limit` deliveries; an empty list where none came within `wait_s`, or where the log is away.

        A cluster that elects a new leader for the consumer refuses requests for some seconds: the next calls ask again, with
        growing pauses. Raises `BrokerError` where the consumer was deleted."""
        try:
            messages = await self._sub.fetch(limit, timeout=wait_s)
        except (
            TimeoutError,
            nats.js.errors.FetchTimeoutError,
        ):  # nats-py raises its own and asyncio's bare one
            return []
        except nats.errors.Error as error:
            await self._wait_for_leader(error)
            return []
        self._pause.reset()
        life = self._broker.client.stats["reconnects"]
        out = []
        for message in messages:
            delivery = await self._broker._admit(message, self.spec)
            if delivery is not None:
                delivery._held = self.held
                delivery._broker, delivery._life = self._broker, life
                self.held.add(delivery)
                out.append(delivery)
        return out

    async def _wait_for_leader(self, error: nats.errors.Error) -> None:
        try:
            await self._broker.js.consumer_info(self.spec.stream, self.spec.name)
        except nats.js.errors.NotFoundError:
            raise BrokerError(
                f"consumer {self.spec.name} is gone: was its stream {self.spec.stream} deleted? A start makes it again."
            ) from error
        except nats.errors.Error as away:
            error = away
        if not retry.passes(error):
            raise BrokerError(f"consumer {self.spec.name}: {retry.reason(error)}") from error
        log.warning("consumer away", consumer=self.spec.name, error=retry.reason(error))
        await self._pause.wait()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            for delivery in await self.batch(256):
                yield delivery

    async def _keep_alive(self) -> None:
        while True:
            await anyio.sleep(self.spec.ack_wait_s / 3)
            for delivery in list(self.held):
                assert delivery._msg is not None
                try:
                    await delivery._msg.in_progress()
                except nats.errors.Error as error:
                    if not retry.passes(error):
                        raise
                    # Without a server the message comes again, as after a death; its holder recognises it.
                    log.warning("not kept alive", consumer=self.spec.name, error=retry.reason(error))
                    break


def not_for(message: Msg, spec: streams.ConsumerSpec) -> bool:
    """Whether a message is a dead letter that was given back to another consumer."""
    return bool(message.headers) and message.headers.get(streams.RETRY_HEADER, spec.name) != spec.name
