"""Group assembly: which completed trajectories are compared with each other, and when a group is complete.

Plain bookkeeping without I/O. A group is the trajectories of one project, model, group id and split. It closes when as
many trajectories as were announced have completed (those without a result count, so that a failed one does not wedge
the group), or when its time is up. Time is the log's: while a backlog is being read, the newest event read says how
late it is, so a judge that was down for an hour does not take the whole backlog for stragglers.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pipeline.config import JudgeConfig
from pipeline.events import Split, TrajectoryCompleted
from pipeline.log.broker import Delivery
from pipeline.names import InvalidNameError, check_name
from pipeline.streams import consumer

REDELIVERY_S = consumer("judge").ack_wait_s + 2.0
"""A group opened by one member waits at least this long for those that a dead judge held."""
_REMEMBERED = 20_000


class GroupKey(NamedTuple):
    """What makes a group one group."""

    project: str
    model: str
    group: str
    split: Split


@dataclass(eq=False)
class Arrival:
    """A completed trajectory and the deliveries that hold it (more than one after a redelivery)."""

    event: TrajectoryCompleted
    seq: int
    deliveries: list[Delivery]


@dataclass(eq=False)
class Group:
    """Trajectories that arrived for one key."""

    key: GroupKey
    deadline: float
    """Unix seconds."""
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    closed_by: Literal["size", "timeout"] = "size"

    @property
    def members(self) -> list[Arrival]:
        """In the order in which the log holds them."""
        return sorted(self.arrivals.values(), key=lambda a: a.seq)

    @property
    def deliveries(self) -> list[Delivery]:
        return [d for a in self.arrivals.values() for d in a.deliveries]


class Closed(NamedTuple):
    """What became of a delivery whose group is closed already."""

    delivery: Delivery
    key: GroupKey
    late: bool
    """False: the group's event holds it, so it only has to be acknowledged."""


def key_of(event: TrajectoryCompleted) -> GroupKey:
    """A trajectory without a group is a group of its own; a group id that can't be part of a subject goes by its hash."""
    group = event.group or event.trajectory
    try:
        check_name(group)
    except InvalidNameError:
        group = "hashed-" + hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return GroupKey(event.project, event.model, group, event.split)


class Assembler:
    """Open groups, those being scored, and whose turn it was already."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._open: dict[GroupKey, Group] = {}
        self._closing: dict[GroupKey, Group] = {}
        self._closed: OrderedDict[GroupKey, frozenset[str]] = OrderedDict()

    def knows(self, key: GroupKey) -> bool:
        """Whether the log has to be asked if the group was scored in an earlier life."""
        return key in self._open or key in self._closing or key in self._closed

    def remember(self, key: GroupKey, trajectories: Iterable[str]) -> None:
        """The group is on the log with these members."""
        self._closed[key] = self._closed.pop(key, frozenset()) | frozenset(trajectories)
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def add(self, delivery: Delivery, event: TrajectoryCompleted, now: float) -> Group | Closed | None:
        """A group that this trajectory completes, or what to do with one whose group is closed; else none."""
        key = key_of(event)
        if (closing := self._closing.get(key)) is not None:
            if (arrival := closing.arrivals.get(event.trajectory)) is None:
                return Closed(delivery, key, late=True)
            arrival.deliveries.append(delivery)
            return None
        if (held := self._closed.get(key)) is not None:
            return Closed(delivery, key, late=event.trajectory not in held)
        group = self._open.get(key)
        if group is None:
            deadline = max(
                event.at / 1e6 + self._config.timeout_s, now + min(REDELIVERY_S, self._config.timeout_s)
            )
            group = self._open[key] = Group(key, deadline)
        if (arrival := group.arrivals.get(event.trajectory)) is not None:
            arrival.deliveries.append(delivery)
            return None
        group.arrivals[event.trajectory] = Arrival(event, delivery.seq, [delivery])
        wanted = max(a.event.group_size for a in group.arrivals.values()) or self._config.group_size
        if not event.group:
            wanted = 1
        return self._close(group) if len(group.arrivals) >= wanted else None

    def due(self, now: float) -> list[Group]:
        """Groups whose time was up at `now` (unix seconds, by the log's time)."""
        late = [g for g in self._open.values() if g.deadline <= now]
        for group in late:
            group.closed_by = "timeout"
            self._close(group)
        return late

    def next_deadline(self) -> float:
        return min((g.deadline for g in self._open.values()), default=math.inf)

    def finished(self, group: Group, held: Iterable[str]) -> None:
        """The group's event is acknowledged; it holds the trajectories `held`."""
        self._closing.pop(group.key, None)
        self.remember(group.key, held)

    @property
    def scoring(self) -> int:
        """How many groups are closed and not yet on the log."""
        return len(self._closing)

    def _close(self, group: Group) -> Group:
        del self._open[group.key]
        self._closing[group.key] = group
        return group
