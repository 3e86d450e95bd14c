"""What the log says of a group: which completed trajectories are its members, and which message closed it.

A pure function of messages, so every judge process that reads the same log comes to the same answer. A group is the
trajectories of one project, model, group id and split. The log orders them: the completion that makes the group full
closes it, or the group's `rollout.timeout` if that comes first. What completes after it is late. Trajectories without
a result count, so that a failed one does not keep its group open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipeline.events import AnyEvent, GroupTimedOut, Split, TrajectoryCompleted
from pipeline.log.broker import Recorded

MOVED_HEADER = "Journeyman-Moved-From"
"""Header of a completion that a judge moved to its group's subject: the sequence at which it was recorded."""


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
    """Stream sequence at which the trajectory was recorded as completed."""


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
    """A group as far as the log was read."""

    group: Group
    """Its members: all that completed before it was closed."""
    late: dict[int, Arrival]
    """What completed after it was closed, by the sequence of the message."""
    first: int
    """Sequence of the message of the first member; 0 if there is none."""
    closed_at: int
    """Sequence of the message that closed it; 0 if it is open."""


def key_of(event: TrajectoryCompleted | GroupTimedOut) -> GroupKey:
    """Return the group of a trajectory, or the one whose time was up."""
    group = event.group if isinstance(event, GroupTimedOut) else event.group_key
    return GroupKey(event.project, event.model, group, event.split)


def read_group(key: GroupKey, messages: Iterable[Recorded[AnyEvent]], group_size: int) -> GroupOnLog:
    """Return what `messages`, in stream order, say of a group. Those of other groups are skipped. `group_size` is the
    size of groups whose members announce none."""
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
            continue  # a dead letter that was delivered again
        arrival = Arrival(event, int(message.headers.get(MOVED_HEADER, message.seq)))
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
