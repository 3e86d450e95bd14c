"""A stream followed from where the reader stands, through restarts of servers: for what every gateway replica must know."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import anyio
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from pipeline.log import retry
from pipeline.log.broker import Broker, BrokerError, Recorded
from pipeline.log.history import Raw
from pipeline.log.place import Place, stream_time_us
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.follow")

_LONG_POLL_S = 2.0
_IDLE_S = 60.0
_EPOCH = datetime.fromtimestamp(0, UTC)


async def tail(
    broker: Broker, stream: str, subjects: list[str], next_seq: Callable[[], int], after: Place | None = None
) -> AsyncGenerator[Recorded, None]:
    """Events from `next_seq()` on, in order and each once, for ever. What can't be decoded goes to the dead letters.

    `after` is the place of the message before them, for a reader that read it."""
    async with aclosing(tail_raw(broker, stream, subjects, next_seq, after)) as messages:
        async for raw in messages:
            # The message itself is read, not fetched once more: a replica that lags would not have it yet.
            recorded = await broker.recorded(stream, raw)
            if recorded is not None:
                yield recorded


async def tail_raw(
    broker: Broker, stream: str, subjects: list[str], next_seq: Callable[[], int], after: Place | None = None
) -> AsyncGenerator[Raw, None]:
    """Messages from `next_seq()` on, undecoded, in order and each once, for ever.

    The consumer is ephemeral: it is made anew wherever the server forgot it, and starts where the reader stands. Where the log
    lost its end meanwhile (a power cut), the server counts the same numbers again: then what is newer than the reader's last
    message follows, whatever its number."""
    stand = after
    pause = retry.Pause()
    while True:
        sub = None
        try:
            if stand is None:
                stand = await _place(broker, stream, next_seq() - 1)
                lost = False
            else:
                lost = await _lost(broker, stream, stand)
            if lost:
                log.error("the log lost its end: following what is new", stream=stream, last=stand.seq)
                stand = Place(0, stand.at)
            by_time = stand.seq == 0 and stand.at > 0
            policy = api.DeliverPolicy.BY_START_TIME if by_time else api.DeliverPolicy.BY_START_SEQUENCE
            sub = await broker.js.pull_subscribe(
                "",
                stream=stream,
                config=api.ConsumerConfig(
                    filter_subjects=subjects,
                    ack_policy=api.AckPolicy.NONE,
                    deliver_policy=policy,
                    opt_start_seq=None if by_time else stand.seq + 1,
                    opt_start_time=_EPOCH + timedelta(microseconds=stand.at) if by_time else None,
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
                    if await _lost(broker, stream, stand):
                        break  # the log lost its end after the look above, as the subscription was on its way
                    continue
                pause.reset()
                for message in messages:
                    raw = _raw(message)
                    if raw.seq > stand.seq:
                        yield raw
                        stand = Place(raw.seq, stream_time_us(raw.headers))
        except (nats.errors.Error, BrokerError) as error:
            # The server is away, or forgot the consumer: whatever it is, following begins again from here.
            log.warning("following a stream again", stream=stream, error=retry.reason(error))
            await pause.wait()
        finally:
            if sub is not None:
                with anyio.move_on_after(1, shield=True):
                    await _drop(sub)


async def _place(broker: Broker, stream: str, seq: int) -> Place:
    """Where the reader stands that has read up to `seq`."""
    there = await broker.leader_get(stream, {"seq": seq}) if seq > 0 else None
    return Place(max(seq, 0), stream_time_us(there.headers) if there is not None else 0)


async def _lost(broker: Broker, stream: str, stand: Place) -> bool:
    """Whether the log no longer holds what the reader read last. Retention takes messages too, but not their numbers."""
    if not stand.seq:
        return False
    there = await broker.leader_get(stream, {"seq": stand.seq})
    if there is not None:
        return not stand.is_of(Place(stand.seq, stream_time_us(there.headers)))
    return int((await broker.stream_info(stream)).state.last_seq) < stand.seq


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
