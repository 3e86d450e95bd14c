"""Computes the state of a group from its messages on the log: its members, and the message that closed it.

It is a pure function, so all judge processes that read the same messages compute the same state. A group consists of
the trajectories with the same project, model, group id and split. Their order is that of the stream: the group is
closed by the completion that makes it full, or by its `rollout.timeout` if that comes first. Completions after that are
late. Trajectories with the outcome `no_result` count, so that a failed one does not keep its group open.

A closed group whose rewards need feedback is ready once every run has it, or at its `rollout.overdue`.
`judge.group_log` reads the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from pipeline.events import AnyEvent, FeedbackTimedOut, GroupTimedOut, SignalGiven, Split, TrajectoryCompleted
from pipeline.log.broker import LogEntry


class GroupKey(NamedTuple):
    """The identity of a group."""

    project: str
    model: str
    group: str
    split: Split


Completion = LogEntry[TrajectoryCompleted]


@dataclass(frozen=True)
class Group:
    """Trajectories that are scored together, in the order of the log."""

    key: GroupKey
    members: tuple[Completion, ...]
    closed_by: Literal["size", "timeout"] = "size"
    signals: tuple[SignalGiven, ...] = ()
    """What was said about its runs until it was ready, in the order of the log."""
    again: bool = False
    """Whether it was discarded because it had no reward, and is scored once more because late feedback may give it
    one."""

    @property
    def trajectories(self) -> frozenset[str]:
        """The ids of its members."""
        return frozenset(a.event.trajectory for a in self.members)


@dataclass(frozen=True)
class GroupOnLog:
    """The state of a group after the messages that were read."""

    group: Group
    """The group with its members: the trajectories that completed before it was closed."""
    late: dict[int, Completion]
    """Trajectories that completed after it was closed, by the sequence of the message."""
    first: int
    """Sequence of the message of the first member; 0 if there is none."""
    closed_at: int
    """Sequence of the message that closed it; 0 if it is open."""
    ready_at: int
    """Sequence of the message with which it can be scored: the one that closed it, or the feedback that it lacked; 0 if
    it is open or lacks feedback."""


def key_of(event: TrajectoryCompleted | GroupTimedOut | FeedbackTimedOut | SignalGiven) -> GroupKey:
    """Return the key of the group to which a completed trajectory, a time-out or a signal belongs."""
    group = event.group_key if isinstance(event, TrajectoryCompleted) else event.group
    return GroupKey(event.project, event.model, group, event.split)


def read_group(
    key: GroupKey,
    messages: Iterable[LogEntry[AnyEvent]],
    group_size: int,
    awaited: frozenset[str] | None = frozenset(),
    until: int = 0,
) -> GroupOnLog:
    """Return the state of a group after `messages`, which are in stream order; messages of other groups are skipped.

    `group_size`: the size of the group if none of its members announces one. `awaited`: the names of the feedback on
    each run without which it is not ready; `None`: it is ready when its time to wait is over. `until`: a sequence up to
    which signals count, also after it was ready."""
    members: dict[str, Completion] = {}
    late: dict[int, Completion] = {}
    signals: list[SignalGiven] = []
    first = closed_at = ready_at = announced = 0
    closed_by: Literal["size", "timeout"] = "size"
    for message in messages:
        event = message.event
        kinds = TrajectoryCompleted | GroupTimedOut | FeedbackTimedOut | SignalGiven
        if not isinstance(event, kinds) or key_of(event) != key:
            continue
        match event:
            case SignalGiven():
                if not ready_at or message.seq <= until:
                    signals.append(event)
            case GroupTimedOut():
                if not closed_at:
                    closed_at, closed_by = message.seq, "timeout"
            case FeedbackTimedOut():
                ready_at = ready_at or (message.seq if closed_at else 0)
            case TrajectoryCompleted():
                if event.trajectory in members:
                    continue  # a dead letter that was published again
                completion = cast(Completion, message)
                if closed_at:
                    late[message.seq] = completion
                    continue
                members[event.trajectory] = completion
                first = first or message.seq
                announced = max(announced, event.group_size)
                alone = event.group in ("", event.trajectory)  # a run that names no group is one of its own
                size = announced or (1 if alone else group_size)
                if len(members) >= size:
                    closed_at = message.seq
        waiting = closed_at and not ready_at and awaited is not None
        if waiting and not _lacks_feedback(members, signals, awaited or frozenset()):
            ready_at = message.seq
    group = Group(key, tuple(members.values()), closed_by, tuple(signals))
    return GroupOnLog(group, late, first, closed_at, ready_at)


def _lacks_feedback(members: Mapping[str, Completion], signals: Iterable[SignalGiven], awaited: frozenset[str]) -> bool:
    """Return whether a member that can be scored has no number about the run under one of the names `awaited`."""
    with_feedback = {(s.trajectory, s.name) for s in signals if s.kind == "number" and s.call < 0}
    scorable = [a.event.trajectory for a in members.values() if a.event.outcome == "scored"]
    return any((run, name) not in with_feedback for name in awaited for run in scorable)
