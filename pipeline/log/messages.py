"""Messages of the log as they are read: where a message lies, the message, and the event in it.

A sequence alone does not identify an event. A power cut can take the end of a stream (`nats.sync`), and the server
then gives the same sequences to other events. The stream time, which the server assigns too, differs for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from pipeline.events import Event

E_co = TypeVar("E_co", bound=Event, covariant=True)


class Place(NamedTuple):
    """A position in a stream: sequence and stream time."""

    seq: int
    at: int
    """Stream time in microseconds since 1970, the nanoseconds cut off; 0 if unknown (events from before it was
    recorded)."""

    def matches(self, other: Place) -> bool:
        """Return whether both may be the same position. An unknown time matches any."""
        return self.seq == other.seq and (self.at == other.at or not self.at or not other.at)


class StoredMessage(NamedTuple):
    """A message of a stream, undecoded."""

    place: Place
    subject: str
    headers: dict[str, str]
    payload: bytes

    @property
    def seq(self) -> int:
        """Its sequence in the stream."""
        return self.place.seq


@dataclass(eq=False)
class LogEntry(Generic[E_co]):
    """An event and the message that carries it."""

    event: E_co
    stream: str
    place: Place
    subject: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def seq(self) -> int:
        """The sequence of the message in the stream."""
        return self.place.seq


class Page(NamedTuple, Generic[E_co]):
    """Some of the events on a subject, in stream order."""

    events: list[LogEntry[E_co]]
    last: int
    """Stream sequence of the last message read, decodable or not."""
    more: bool
    """Whether the subject may hold more messages after `last`."""
    not_whole: Sequence[int] = ()
    """Numbers, in their trajectories, of exchanges that were left out because what they continue is gone."""


def stream_time_us(text: str) -> int:
    """Return the stream time, in microseconds, that the server writes as text when a message is read."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole + "+00:00").timestamp())
    return seconds * 1_000_000 + int(fraction.ljust(6, "0")[:6] or 0)


def parse_ack_subject(reply: str) -> tuple[int, Place]:
    """Return how often a message was delivered, and its place, from the reply subject of a delivery.

    `$JS.ACK.<stream>.<consumer>.<deliveries>.<seq>.<consumer seq>.<ns>.<pending>`, with a domain and an account hash
    after `ACK` where the server is part of a larger system (NATS ADR-15)."""
    tokens = reply.split(".")
    seq_at = 5 if len(tokens) == 9 else 7
    return int(tokens[seq_at - 1]), Place(int(tokens[seq_at]), int(tokens[seq_at + 2]) // 1000)


def consumer_seq(reply: str) -> int:
    """Return the number of a delivery among those of its consumer, from 1, from its reply subject
    (`parse_ack_subject`)."""
    tokens = reply.split(".")
    return int(tokens[6 if len(tokens) == 9 else 8])
