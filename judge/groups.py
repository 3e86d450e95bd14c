"""Computes the state of a group from its messages on the log: its members, and the message that closed it.

It is a pure function, so all judge processes that read the same messages compute the same state. A group consists of
the trajectories with the same project, model, group id and split. Their order is that of the stream: the group is
closed by the completion that makes it full, or by its `rollout.timeout` if that comes first. Completions after that are
late. Trajectories with the outcome `no_result` count, so that a failed one does not keep its group open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.events import AnyEvent, GroupTimedOut, Split, TrajectoryCompleted
from pipeline.log.broker import Recorded


class GroupKey(NamedTuple):
    """The identity of a group."""

    project: str
    model: str
    group: str
    split: Split


class Arrival(NamedTuple):
    """A completed trajectory on the log."""

    event: TrajectoryCompleted
    seq: int
    """Stream sequence of its `rollout.completed`."""


@dataclass(frozen=True)
class Group:
    """Trajectories that are scored together, in the order of the log."""

    key: GroupKey
    members: tuple[Arrival, ...]
    closed_by: Literal["size", "timeout"] = "size"

    @property
    def trajectories(self) -> frozenset[str]:
        return frozenset(a.event.trajectory for a in self.members)


@dataclass(frozen=True)
class GroupOnLog:
    """The state of a group after the messages that were read."""

    group: Group
    """The group with its members: the trajectories that completed before it was closed."""
    late: dict[int, Arrival]
    """Trajectories that completed after it was closed, by the sequence of the message."""
    first: int
    """Sequence of the message of the first member; 0 if there is none."""
    closed_at: int
    """Sequence of the message that closed it; 0 if it is open."""


def key_of(event: TrajectoryCompleted | GroupTimedOut) -> GroupKey:
    """Return the group of a completed trajectory, or of a time-out."""
    group = event.group if isinstance(event, GroupTimedOut) else event.group_key
    return GroupKey(event.project, event.model, group, event.split)


def read_group(key: GroupKey, messages: Iterable[Recorded[AnyEvent]], group_size: int) -> GroupOnLog:
    """Return the state of a group after `messages`, which are in stream order; messages of other groups are skipped.

    `group_size`: the size of the group if none of its members announces one."""
    members: dict[str, Arrival] = {}
    late: dict[int, Arrival] = {}
    first = closed_at = announced = 0
    closed_by: Literal["size", "timeout"] = "size"
    for message in messages:
        event = message.event
        if not isinstance(event, TrajectoryCompleted | GroupTimedOut) or key_of(event) != key:
            continue
        if isinstance(event, GroupTimedOut):
            if not closed_at:
                closed_at, closed_by = message.seq, "timeout"
            continue
        if event.trajectory in members:
            continue  # a dead letter that was published again
        arrival = Arrival(event, message.seq)
        if closed_at:
            late[message.seq] = arrival
            continue
        members[event.trajectory] = arrival
        first = first or message.seq
        announced = max(announced, event.group_size)
        wanted = (announced or group_size) if event.group else 1
        if len(members) >= wanted:
            closed_at = message.seq
    return GroupOnLog(Group(key, tuple(members.values()), closed_by), late, first, closed_at)
