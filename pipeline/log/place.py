"""Where an event lies in its stream: sequence and stream time together.

A sequence alone does not identify an event. A power cut can take the end of a stream (`nats.sync`), and the server then counts
the same numbers again for other events. The stream time, which the server gives each message, differs for those.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pipeline.log.history import Reader, Recorded


class Place(NamedTuple):
    """A position in a stream."""

    seq: int
    at: int
    """Stream time in microseconds since 1970, the nanoseconds cut off; 0 where it is not known (events written before it
    was recorded)."""

    def is_of(self, other: Place) -> bool:
        """Whether both may be the same position: a time that is not known fits any."""
        return self.seq == other.seq and (self.at == other.at or not self.at or not other.at)


def stream_time_us(headers: Mapping[str, str]) -> int:
    """The stream time of a message that was read from its stream, by the headers that the server gave it."""
    text = headers["Nats-Time-Stamp"]
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole + "+00:00").timestamp())
    return seconds * 1_000_000 + int(fraction.ljust(6, "0")[:6] or 0)


def told(reply: str) -> tuple[int, Place]:
    """How often a delivery was made, and its place, from its reply subject.

    `$JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<consumer seq>.<ns>.<pending>`, with a domain and an account hash after
    `ACK` where the server is part of a larger system (NATS ADR-15)."""
    tokens = reply.split(".")
    at = 5 if len(tokens) == 9 else 7
    return int(tokens[at - 1]), Place(int(tokens[at]), int(tokens[at + 2]) // 1000)


def place_of(recorded: Recorded) -> Place:
    """Where an event lies that was read from its stream or delivered by a consumer."""
    reply = getattr(recorded, "reply", "")
    if reply:
        return told(reply)[1]
    return Place(recorded.seq, stream_time_us(recorded.headers))


async def holds(reader: Reader, stream: str, place: Place) -> bool:
    """Whether the message at `place` is in the stream, by its leader. False where retention took it too."""
    raw = await reader.leader_get(stream, {"seq": place.seq})
    return raw is not None and place.is_of(Place(raw.seq, stream_time_us(raw.headers)))
