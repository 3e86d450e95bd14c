"""Reads and writes groups on the log: members, ends, timers, late trajectories.

`judge.service` asks here what the log says of a group whenever a trajectory or a signal arrives, and publishes the
scores itself. A group is closed when it is full or its time is over (`rollout.timeout`); it is ready when it also has
the feedback that it waits for, or that wait is over (`rollout.overdue`). Both times are timers of the NATS server, so
they end also if every judge is down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from judge.feedback import counted_signals
from judge.groups import Completion, GroupKey, GroupOnLog, read_group
from judge.scoring import late_event
from pipeline import crash
from pipeline.concurrency.backoff import Backoff
from pipeline.config import FeedbackConfig, JudgeConfig
from pipeline.events import (
    AnyEvent,
    FeedbackTimedOut,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    SignalGiven,
    TrajectoryCompleted,
    now_us,
)
from pipeline.log.broker import Broker, Delivery, HistoryGoneError, LogEntry
from pipeline.log.messages import Place
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.group_log")

_ROLLOUTS, _GROUPS = stream_of(TrajectoryCompleted), stream_of(GroupScored)
WRONG_EVENT_DELAY_S = 1.0
"""Delay before an event that does not belong on its subject is delivered again. After `max_deliver` times it becomes a
dead letter."""
_MAX_TIMEOUT_S = 10 * 365 * 86_400.0
"""Longest time of a timer: ten years. A later date may be none that the server can read."""


@dataclass(frozen=True)
class GroupEnd:
    """What the judges' events on the log say about the end of a group."""

    ended: bool = False
    """Whether the group was scored or discarded as a whole."""
    trajectories: frozenset[str] = field(default_factory=frozenset)
    """The trajectories in these events, including late ones."""
    scored: bool = False
    """Whether it was scored."""


class GroupLog:
    """Reads and writes groups over one connection. Methods raise `BrokerError`."""

    def __init__(self, broker: Broker, config: JudgeConfig, feedback: FeedbackConfig | None = None) -> None:
        self._broker, self._config, self._feedback = broker, config, feedback or FeedbackConfig()
        self.awaited = feedback_names(config) if self._feedback.wait_s else frozenset[str]()
        """Names of the feedback that a closed group waits for."""
        self._waits_whole = bool(self._feedback.wait_s) and self._feedback.wait_for == "all"

    @property
    def waits_for_feedback(self) -> bool:
        """Whether closed groups wait for feedback before they are scored."""
        return bool(self.awaited) or self._waits_whole

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, key: GroupKey, place: Place, *, later: bool = False) -> GroupOnLog | None:
        """Return the state of a group on the log, at least up to the message at `place`: the delivery that the caller
        handles. `None` if the log no longer holds that message. `later`: include signals up to `place` that came after
        the group was ready.

        Any replica may answer. A replica that lags lacks the newest messages, so the read is repeated if the message at
        `place` is missing."""
        subject = subject_filter(TrajectoryCompleted, project=key.project, model=key.model, group_key=key.group)
        signals = subject_filter(SignalGiven, project=key.project, model=key.model, group=key.group)
        subjects = [subject, self._timeout_event(key).subject(), self._overdue_event(key).subject(), signals]
        backoff = Backoff()
        while True:
            messages = await self._broker.newest_messages(_ROLLOUTS, subjects)
            if any(m.seq == place.seq and m.place.matches(place) for m in messages):
                break
            if not await self._broker.holds(_ROLLOUTS, place):
                return None
            await backoff.wait()
        decoded = []
        for message in messages:
            try:
                event = await self._broker.decode(message.payload)
            except (msgspec.DecodeError, HistoryGoneError):
                continue  # the consumer makes it a dead letter when it is delivered
            if not isinstance(event, SignalGiven) or counted_signals([event], self._config):
                decoded.append(LogEntry[AnyEvent](event, _ROLLOUTS, message.place, message.subject, message.headers))
        awaited = None if self._waits_whole else self.awaited
        return read_group(key, decoded, self._config.group_size, awaited, place.seq if later else 0)

    async def read_end(self, key: GroupKey) -> GroupEnd:
        """Return whether the judges have scored or discarded a group, and which trajectories their events name, as the
        stream's leader has it."""
        names: dict[str, Any] = {"project": key.project, "model": key.model, "group": key.group}
        # The subject of all events about the group, whatever their kind.
        of_group = subject_filter(GroupDiscarded, **names).replace(GroupDiscarded.subject_prefix(), "group.*", 1)
        if await self._broker.leader_get(_GROUPS, {"last_by_subj": of_group}) is None:
            return GroupEnd()  # the usual case: the group has no event yet
        ended, scored_once, trajectories = False, False, set[str]()
        for scored in [r.event for r in await self._broker.read(GroupScored, **names)]:
            if (scored.branch, scored.split) == ("main", key.split):
                ended = scored_once = True
                trajectories |= {m.trajectory for m in scored.members}
        for discarded in [r.event for r in await self._broker.read(GroupDiscarded, **names)]:
            if (discarded.branch, discarded.by, discarded.split) == ("main", "judge", key.split):
                ended = ended or discarded.reason != "late"
                trajectories |= set(discarded.trajectories)
        return GroupEnd(ended, frozenset(trajectories), scored_once)

    # -- writing -------------------------------------------------------------------------------------------------

    async def record_late(self, completions: Iterable[Completion], recorded: frozenset[str]) -> None:
        """Publish a `group.discarded` with the reason `late` for each of `completions` whose trajectory is not among
        `recorded`, those that the group's events name."""
        for event in (c.event for c in completions if c.event.trajectory not in recorded):
            await self._broker.publish(late_event(event))
            logger.info("late", group=event.group, trajectory=event.trajectory)

    async def set_deadline(self, key: GroupKey, first: Place) -> None:
        """Set the deadline timer of an open group. `first`: the place of its first completed trajectory, whose time is
        the clock of the NATS server, which delivers the timer."""
        at = first.at / 1e6 + min(self._config.timeout_s, _MAX_TIMEOUT_S)
        await self._broker.set_timer(self._timeout_event(key), at)
        crash.point("judge.timer_set")

    async def set_feedback_deadline(self, key: GroupKey, closed_at_us: int) -> None:
        """Set the timer of a group that was closed at this stream time (microseconds) and waits for feedback."""
        at = closed_at_us / 1e6 + min(self._feedback.wait_s, _MAX_TIMEOUT_S)
        await self._broker.set_timer(self._overdue_event(key), at)
        crash.point("judge.feedback_timer_set")

    async def cancel_deadline(self, key: GroupKey) -> None:
        """Cancel the timers of a group: that of its deadline and, if groups wait for feedback, that of the wait. If a
        request is lost, the timer is delivered and finds the group closed."""
        await self._broker.cancel_timer(self._timeout_event(key))
        if self.waits_for_feedback:
            await self._broker.cancel_timer(self._overdue_event(key))

    async def record_timeout(self, event: GroupTimedOut | FeedbackTimedOut) -> Place:
        """Publish the `rollout.timeout` or `rollout.overdue` of a group, once. Return its place on the log, that of the
        earlier one if it was published before."""
        ack = await self._broker.publish(msgspec.structs.replace(event, at=now_us()))
        return Place(ack.seq, 0)

    def _timeout_event(self, key: GroupKey) -> GroupTimedOut:
        """Return the event that a group's time to become full is over."""
        return GroupTimedOut(**key._asdict(), timeout_s=self._config.timeout_s)

    def _overdue_event(self, key: GroupKey) -> FeedbackTimedOut:
        """Return the event that a closed group's wait for feedback is over."""
        return FeedbackTimedOut(**key._asdict(), wait_s=self._feedback.wait_s)


def feedback_names(config: JudgeConfig) -> frozenset[str]:
    """Return the names of the rewards of kind `feedback`, which are those of the signals that they are made of."""
    return frozenset(r.name for r in config.rewards if r.kind == "feedback")


def has_own_subject(delivery: Delivery, event: TrajectoryCompleted | SignalGiven) -> bool:
    """Return whether a completion or a signal was delivered on the subject that its fields give. On another one,
    `GroupLog.read` would not find it."""
    subject = event.subject()
    # The subject of a dead letter that was published again has one more token.
    return delivery.subject == subject or delivery.subject.startswith(f"{subject}.")
