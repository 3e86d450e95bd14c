"""Assembles groups: which completed trajectories are compared with each other, and when a group is complete.

Bookkeeping without I/O. A group is the trajectories of one project, model, group id and split. It closes when as many
trajectories have completed as were announced, or when its time is up. Trajectories without a result count, so that a
failed one does not keep its group open. Time is that of the log: while a backlog is read, the newest event read is
the present, so that a judge which was down for an hour does not treat the whole backlog as late.
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
"""A group stays open at least this long, so that trajectories delivered to a judge that died can be delivered again."""
_MAX_CLOSED = 20_000
"""Closed groups that are remembered."""


class GroupKey(NamedTuple):
    """The identity of a group."""

    project: str
    model: str
    group: str
    split: Split


@dataclass(eq=False)
class Arrival:
    """A completed trajectory and its deliveries (several after a redelivery)."""

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
        """The trajectories that arrived, in the order of the log."""
        return sorted(self.arrivals.values(), key=lambda a: a.seq)

    @property
    def deliveries(self) -> list[Delivery]:
        return [d for a in self.arrivals.values() for d in a.deliveries]


class AfterClosing(NamedTuple):
    """A delivery for a group whose event is on the log, or being made."""

    late: bool
    """The group's event does not hold the trajectory. If it does, the delivery only has to be acknowledged."""


def key_of(event: TrajectoryCompleted) -> GroupKey:
    """Return the group of a trajectory. Without a group id it is a group of its own; an id that no subject can hold
    is hashed."""
    group = event.group or event.trajectory
    try:
        check_name(group)
    except InvalidNameError:
        group = "hashed-" + hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return GroupKey(event.project, event.model, group, event.split)


class GroupAssembler:
    """The groups that are open, those being scored, and those that are closed."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._open: dict[GroupKey, Group] = {}
        self._closing: dict[GroupKey, Group] = {}
        self._closed: OrderedDict[GroupKey, frozenset[str]] = OrderedDict()

    def knows(self, key: GroupKey) -> bool:
        """Return whether the group's state is known here. If not, the log says whether an earlier process scored it."""
        return key in self._open or key in self._closing or key in self._closed

    def mark_closed(self, key: GroupKey, trajectories: Iterable[str]) -> None:
        """Remember that events on the log hold these trajectories of the group."""
        self._closed[key] = self._closed.pop(key, frozenset()) | frozenset(trajectories)
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)

    def add(self, delivery: Delivery, event: TrajectoryCompleted, now: float) -> Group | AfterClosing | None:
        """Add a trajectory. Return the group if this completes it, `AfterClosing` if it is closed, `None` if it stays
        open."""
        key = key_of(event)
        closing, closed = self._closing.get(key), self._closed.get(key)
        if closing is None and closed is not None:
            return AfterClosing(late=event.trajectory not in closed)
        if closing is not None and event.trajectory not in closing.arrivals:
            return AfterClosing(late=True)
        group = closing or self._open.get(key)
        if group is None:
            soonest = now + min(REDELIVERY_S, self._config.timeout_s)
            group = Group(key, max(event.at / 1e6 + self._config.timeout_s, soonest))
            self._open[key] = group
        if (arrival := group.arrivals.get(event.trajectory)) is not None:
            arrival.deliveries.append(delivery)
            return None
        group.arrivals[event.trajectory] = Arrival(event, delivery.seq, [delivery])
        announced = max(a.event.group_size for a in group.arrivals.values())
        wanted = (announced or self._config.group_size) if event.group else 1
        return self._close(group) if len(group.arrivals) >= wanted else None

    def close_due(self, now: float) -> list[Group]:
        """Close and return the groups whose time is up at `now` (Unix seconds, by the log's time)."""
        due = [g for g in self._open.values() if g.deadline <= now]
        for group in due:
            group.closed_by = "timeout"
            self._close(group)
        return due

    def next_deadline(self) -> float:
        """Return the earliest deadline of an open group in Unix seconds, or infinity."""
        return min((g.deadline for g in self._open.values()), default=math.inf)

    def finish(self, group: Group, trajectories: Iterable[str]) -> None:
        """The log has acknowledged the group's event; events on the log hold these trajectories."""
        self._closing.pop(group.key, None)
        self.mark_closed(group.key, trajectories)

    @property
    def scoring(self) -> int:
        """The number of groups that are closed and not yet on the log."""
        return len(self._closing)

    def _close(self, group: Group) -> Group:
        del self._open[group.key]
        self._closing[group.key] = group
        return group
