"""A stream followed from where the reader stands, through restarts of the server: for what every gateway replica must know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import nats.errors
import nats.js.errors
from nats.js import api

from pipeline.broker import Broker, BrokerUnavailableError, HistoryGoneError, Recorded
from pipeline.log import get_logger

log = get_logger("rollout_gateway.tail")

_LONG_POLL_S = 5.0
_IDLE_S = 60.0


async def tail(
    broker: Broker, stream: str, subjects: list[str], next_seq: Callable[[], int]
) -> AsyncIterator[Recorded]:
    """Events from `next_seq()` on, in order, for ever. The consumer is ephemeral: it is made anew wherever the server
    forgot it, and starts where the reader stands. An event that retention took meanwhile is passed by."""
    while True:
        try:
            sub = await broker.js.pull_subscribe(
                "",
                stream=stream,
                config=api.ConsumerConfig(
                    filter_subjects=subjects,
                    ack_policy=api.AckPolicy.NONE,
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=next_seq(),
                    inactive_threshold=_IDLE_S,
                    mem_storage=True,
                ),
            )
        except (nats.errors.Error, nats.js.errors.Error) as error:
            log.warning("following a stream", stream=stream, error=str(error) or type(error).__name__)
            await anyio.sleep(0.5)  # paces the retry of a server that is away
            continue
        try:
            while True:
                try:
                    messages = await sub.fetch(100, timeout=_LONG_POLL_S)
                except (
                    TimeoutError,
                    nats.js.errors.FetchTimeoutError,
                ):  # nats-py raises its own and asyncio's
                    await sub.consumer_info()  # raises where the server forgot the consumer
                    continue
                for message in messages:
                    seq = int(message.metadata.sequence.stream)
                    try:
                        recorded = await broker.get(stream, seq)
                    except HistoryGoneError as error:
                        log.warning("passed by", stream=stream, seq=seq, error=str(error))
                        continue
                    yield recorded
        except (nats.errors.Error, nats.js.errors.Error, BrokerUnavailableError) as error:
            log.warning("following a stream again", stream=stream, error=str(error) or type(error).__name__)
            await anyio.sleep(0.2)  # paces the retry of a server that is away
        finally:
            with anyio.move_on_after(1, shield=True):
                await _drop(sub)


async def _drop(sub: object) -> None:
    try:
        await sub.unsubscribe()  # type: ignore[attr-defined]
    except nats.errors.Error as error:
        log.debug("unsubscribe", error=str(error) or type(error).__name__)
