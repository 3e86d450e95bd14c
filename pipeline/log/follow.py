"""Follow a stream from a position on, through restarts of servers: for the events that every gateway replica must
know.

`follow_events` yields decoded events, `follow_messages` the messages of event classes, `follow_subjects` those of any
subjects. A *position* is the place (sequence and stream time) of the last message that was read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import nats.errors
from nats.js import api

from pipeline.concurrency.backoff import Backoff
from pipeline.errors import BrokerError, LogShrankError
from pipeline.events import Event
from pipeline.log import retry
from pipeline.log.history import Reader
from pipeline.log.messages import LogEntry, Place, StoredMessage, consumer_seq, parse_ack_subject
from pipeline.log.pulling import ConsumerGoneError, pulling
from pipeline.log.stream_reader import StreamReader
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import new_id
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.log.follow")

E = TypeVar("E", bound=Event)

_PAGE = 100
"""Messages that are taken at once."""
_LONG_POLL_S = 2.0
"""Longest wait for messages, after which the end of the stream is checked."""
_IDLE_S = 60.0
"""Time without a request after which the server deletes an ephemeral consumer."""
_EPOCH = datetime.fromtimestamp(0, UTC)


async def follow_events(
    reader: Reader,
    events: Sequence[type[E]],
    next_seq: Callable[[], int],
    after: Place | None = None,
    **keys: str | int,
) -> AsyncGenerator[LogEntry[E], None]:
    """Yield events of the given classes, all of one stream, from `next_seq()` on: in order, each once, for ever.

    `after` is the place of the last message that the caller read; with sequence 0, all since its time follow. Without
    it, `next_seq` is asked once, when the iteration begins. `keys` narrow the subjects (`subject_filter`). A message
    that cannot be decoded is skipped. Raises `LogShrankError` if the log lost the last message."""
    stream = stream_of(events[0])
    async with aclosing(follow_messages(reader, events, next_seq, after, **keys)) as messages:
        async for message in messages:
            # The message itself is decoded, not fetched once more: a replica that lags would not hold it yet.
            recorded = await reader.recorded(stream, message)
            if recorded is not None and isinstance(recorded.event, tuple(events)):
                yield recorded  # type: ignore[misc]  # the class of its event was just checked


def follow_messages(
    reader: StreamReader,
    events: Sequence[type[Event]],
    next_seq: Callable[[], int],
    after: Place | None = None,
    **keys: str | int,
) -> AsyncGenerator[StoredMessage, None]:
    """`follow_events`, undecoded."""
    subjects = [subject_filter(event, **keys) for event in events]
    return follow_subjects(reader, stream_of(events[0]), subjects, next_seq, after)


async def follow_subjects(
    reader: StreamReader, stream: str, subjects: Sequence[str], next_seq: Callable[[], int], after: Place | None = None
) -> AsyncGenerator[StoredMessage, None]:
    """`follow_messages` by stream and subjects, which may hold wildcards.

    The consumer is ephemeral: if the server forgot it, another one begins at the reader's position. The server counts
    what it sent into a broken connection as delivered and does not send it again. So another consumer begins after a
    reconnection, and where delivery numbers skip."""
    position = after
    backoff = Backoff()
    while True:
        try:
            if position is None:
                position = await _place_of(reader, stream, next_seq() - 1)
            await _check_end(reader, stream, position)
            reconnects, delivered = reader.client.stats["reconnects"], 0
            consumer = await _create_consumer(reader, stream, subjects, position)
            async with pulling(reader.client, stream, consumer) as puller:
                while True:
                    messages = await puller.take(_PAGE, _LONG_POLL_S)
                    if not messages:
                        await _check_end(reader, stream, position)
                    backoff.reset()
                    for delivery in messages:
                        delivered += 1
                        if consumer_seq(delivery.reply) != delivered:
                            raise ConsumerGoneError("a delivery was lost")
                        place = parse_ack_subject(delivery.reply)[1]
                        message = StoredMessage(place, delivery.subject, delivery.headers, delivery.data)
                        if message.seq > position.seq:
                            yield message
                            position = message.place
                    if reader.client.stats["reconnects"] != reconnects:
                        raise ConsumerGoneError("the connection broke")
        except LogShrankError:
            raise
        except (nats.errors.Error, BrokerError, ConsumerGoneError) as error:
            # The server is away, or forgot the consumer: in any case, following begins again at the position.
            logger.warning("following a stream again", stream=stream, error=retry.reason(error))
            await backoff.wait()


async def _create_consumer(reader: StreamReader, stream: str, subjects: Sequence[str], position: Place) -> str:
    """Create an ephemeral consumer of what comes after `position`; return its name."""
    if not reader.client.is_connected:
        # Between two servers nats-py knows no server's version, and would send a request without the consumer's name,
        # to a subject that services have no right to.
        raise nats.errors.ConnectionReconnectingError
    by_time = position.seq == 0 and position.at > 0
    policy = api.DeliverPolicy.BY_START_TIME if by_time else api.DeliverPolicy.BY_START_SEQUENCE
    config = api.ConsumerConfig(
        name=new_id("follow"),
        filter_subjects=list(subjects),
        ack_policy=api.AckPolicy.NONE,
        deliver_policy=policy,
        opt_start_seq=None if by_time else position.seq + 1,
        opt_start_time=_EPOCH + timedelta(microseconds=position.at) if by_time else None,
        inactive_threshold=_IDLE_S,
        mem_storage=True,
    )
    return str((await reader.js.add_consumer(stream, config)).name)


async def _place_of(reader: StreamReader, stream: str, seq: int) -> Place:
    """Return the place of a message that the caller read; its time is unknown if retention removed it."""
    message = await reader.leader_get(stream, {"seq": seq}) if seq > 0 else None
    return message.place if message is not None else Place(max(seq, 0), 0)


async def _check_end(reader: StreamReader, stream: str, last: Place) -> None:
    """Raise `LogShrankError` if the log lost the message that the reader read last."""
    if await reader.has_reached(stream, last):
        return
    end = (await reader.stream_info(stream)).state.last_seq
    raise LogShrankError(
        f"the log lost its end: {stream} no longer holds message {last.seq}, it ends at {end}. Start again"
    )
