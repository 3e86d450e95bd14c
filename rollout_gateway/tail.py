"""A stream followed from where the reader stands, through restarts of servers: for what every gateway replica must know."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime

import anyio
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from pipeline import retry
from pipeline.broker import Broker, BrokerError, Recorded
from pipeline.history import Raw
from pipeline.log import get_logger

log = get_logger("rollout_gateway.tail")

_LONG_POLL_S = 2.0
_IDLE_S = 60.0


async def tail(
    broker: Broker, stream: str, subjects: list[str], next_seq: Callable[[], int]
) -> AsyncGenerator[Recorded, None]:
    """Events from `next_seq()` on, in order and each once, for ever. What can't be decoded goes to the dead letters."""
    async with aclosing(tail_raw(broker, stream, subjects, next_seq)) as messages:
        async for raw in messages:
            # The message itself is read, not fetched once more: a replica that lags would not have it yet.
            recorded = await broker.recorded(stream, raw)
            if recorded is not None:
                yield recorded


async def tail_raw(
    broker: Broker, stream: str, subjects: list[str], next_seq: Callable[[], int]
) -> AsyncGenerator[Raw, None]:
    """Messages from `next_seq()` on, undecoded, in order and each once, for ever.

    The consumer is ephemeral: it is made anew wherever the server forgot it, and starts where the reader stands."""
    position = 0
    pause = retry.Pause()
    while True:
        position = max(position, next_seq())
        sub = None
        try:
            sub = await broker.js.pull_subscribe(
                "",
                stream=stream,
                config=api.ConsumerConfig(
                    filter_subjects=subjects,
                    ack_policy=api.AckPolicy.NONE,
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=max(1, position),
                    inactive_threshold=_IDLE_S,
                    mem_storage=True,
                ),
            )
            while True:
                try:
                    messages = await sub.fetch(100, timeout=_LONG_POLL_S)
                except (
                    TimeoutError,
                    nats.js.errors.FetchTimeoutError,
                ):  # nats-py raises its own and asyncio's
                    await sub.consumer_info()  # raises where the server forgot the consumer
                    continue
                pause.reset()
                for message in messages:
                    raw = _raw(message)
                    if raw.seq >= position:
                        yield raw
                        position = raw.seq + 1
        except (nats.errors.Error, BrokerError) as error:
            # The server is away, or forgot the consumer: whatever it is, following begins again from here.
            log.warning("following a stream again", stream=stream, error=retry.reason(error))
            await pause.wait()
        finally:
            if sub is not None:
                with anyio.move_on_after(1, shield=True):
                    await _drop(sub)


def _raw(message: Msg) -> Raw:
    headers = dict(message.headers or {})
    seq = int(message.metadata.sequence.stream)
    headers |= {
        "Nats-Sequence": str(seq),
        "Nats-Subject": message.subject,
        "Nats-Time-Stamp": _timestamp(message),
    }
    return Raw(seq, message.subject, headers, message.data)


def _timestamp(message: Msg) -> str:
    """When the server took the message in, as reads of the stream say it."""
    tokens = message.reply.split(".")  # with a domain and an account hash in a larger system (NATS ADR-15)
    nanoseconds = int(tokens[7 if len(tokens) == 9 else 9])
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


async def _drop(sub: object) -> None:
    try:
        await sub.unsubscribe()  # type: ignore[attr-defined]
    except nats.errors.Error as error:
        log.debug("unsubscribe", error=retry.reason(error))
