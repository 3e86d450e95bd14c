"""Groups on the log: what a judge reads of them, and what it writes besides the scores."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from judge.groups import MOVED_HEADER, Arrival, GroupKey, GroupOnLog, read_group
from judge.scoring import late_event
from pipeline import crash
from pipeline.backoff import Backoff
from pipeline.config import JudgeConfig
from pipeline.events import (
    AnyEvent,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    TrajectoryCompleted,
    encode,
    now_us,
)
from pipeline.log.broker import Broker, Delivery, HistoryGoneError, Recorded
from pipeline.log.messages import Place
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.streams import RETRY_HEADER
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.group_log")

_ROLLOUTS, _GROUPS = stream_of(TrajectoryCompleted), stream_of(GroupScored)
_COMPLETED, _MOVED = "rollout.completed.", "rollout.moved."
_KEEP = 512
"""Closed groups that are kept until their trajectories are delivered."""
_MAX_TIMEOUT_S = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class GroupEnd:
    """The events on the log that a judge wrote for a group."""

    ended: bool = False
    """Whether the group was scored, or discarded as a whole."""
    trajectories: frozenset[str] = field(default_factory=frozenset)
    """The trajectories in these events, late ones included."""


class GroupLog:
    """Reads and writes over one connection. Errors: `BrokerError`."""

    def __init__(self, broker: Broker, config: JudgeConfig) -> None:
        self._broker, self._config = broker, config
        self._closed: OrderedDict[GroupKey, GroupOnLog] = OrderedDict()
        """Groups that were found closed, and what closed them cannot change. This saves reads only."""
        self._reconnects = 0
        """How often the connection had been made again when `_closed` was begun. A server that lost the end of its log
        in a power cut gives the same sequences to other events."""

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, key: GroupKey, place: Place) -> GroupOnLog | None:
        """Return a group as the log has it, at least up to the message at `place`. `None` if the log does not hold
        that message any more.

        Any replica may answer, and one that lags does not hold the newest messages: if the one at `place` is missing,
        the read is repeated."""
        if self._reconnects != self._broker.client.stats["reconnects"]:
            self._closed.clear()
            self._reconnects = self._broker.client.stats["reconnects"]
        known = self._closed.get(key)
        if known is not None and place.seq <= known.closed_at:
            return known
        found = await self._read(key, place)
        if found is not None and found.closed_at:
            self._closed[key] = found
            if len(self._closed) > _KEEP:
                self._closed.popitem(last=False)
        return found

    async def _read(self, key: GroupKey, place: Place) -> GroupOnLog | None:
        subject = subject_filter(
            TrajectoryCompleted, project=key.project, model=key.model, group_key=key.group
        )
        timeout = self._timeout(key).subject()
        subjects = [subject, _MOVED + subject.removeprefix(_COMPLETED), timeout]
        backoff = Backoff()
        while True:
            found = await self._broker.newest_messages(_ROLLOUTS, subjects)
            if any(m.seq == place.seq and m.place.matches(place) for m in found):
                break
            if not await self._broker.holds(_ROLLOUTS, place):
                return None
            await backoff.wait()
        messages = []
        for message in found:
            try:
                event = await self._broker.decode(message.payload)
            except (msgspec.DecodeError, HistoryGoneError):
                continue  # its own delivery puts it among the dead letters
            messages.append(
                Recorded[AnyEvent](event, _ROLLOUTS, message.seq, message.subject, message.headers)
            )
        return read_group(key, messages, self._config.group_size)

    async def end_of(self, key: GroupKey) -> GroupEnd:
        """Return what judges wrote for a group, by the log's leader."""
        names: dict[str, Any] = {"project": key.project, "model": key.model, "group": key.group}
        of_group = subject_filter(GroupDiscarded, **names).replace(
            GroupDiscarded.subject_prefix(), "group.*", 1
        )
        if await self._broker.leader_get(_GROUPS, {"last_by_subj": of_group}) is None:
            return GroupEnd()  # as a rule: then one request is enough
        ended, held = False, set[str]()
        for scored in [r.event for r in await self._broker.read(GroupScored, **names)]:
            if (scored.branch, scored.split) == ("main", key.split):
                ended = True
                held |= {m.trajectory for m in scored.members}
        for discarded in [r.event for r in await self._broker.read(GroupDiscarded, **names)]:
            if (discarded.branch, discarded.by, discarded.split) == ("main", "judge", key.split):
                ended = ended or discarded.reason != "late"
                held |= set(discarded.trajectories)
        return GroupEnd(ended, frozenset(held))

    # -- writing -------------------------------------------------------------------------------------------------

    async def record_late(self, arrivals: Iterable[Arrival], held: frozenset[str]) -> None:
        """Record as late those trajectories that are not `held` by an event of their group."""
        for event in (a.event for a in arrivals if a.event.trajectory not in held):
            await self._broker.publish(late_event(event))
            log.info("late", group=event.group, trajectory=event.trajectory)

    async def move(self, delivery: Delivery, event: TrajectoryCompleted) -> None:
        """Publish a completion of an earlier version, whose subject has no group, on its group's subject for judges.
        Other services have it already. Safe to repeat."""
        headers = {k: v for k, v in delivery.headers.items() if not k.startswith("Nats-")}
        headers |= {RETRY_HEADER: "judge", MOVED_HEADER: str(delivery.seq)}
        subject = _MOVED + event.subject().removeprefix(_COMPLETED)
        await self._broker.publish_raw(subject, encode(event), headers)

    async def set_deadline(self, key: GroupKey, first: TrajectoryCompleted) -> None:
        """Set the timer of an open group; `first` is its first completed trajectory."""
        at = first.at / 1e6 + min(self._config.timeout_s, _MAX_TIMEOUT_S)
        await self._broker.set_timer(self._timeout(key), max(at, time.time()))
        crash.point("judge.timer_set")

    def forget(self, key: GroupKey) -> None:
        """Keep nothing of a group that was scored."""
        self._closed.pop(key, None)

    async def cancel_deadline(self, key: GroupKey) -> None:
        """Remove the timer of a group. If the request is lost, the timer's delivery finds the group closed."""
        await self._broker.cancel_timer(self._timeout(key))

    async def time_out(self, event: GroupTimedOut) -> Place:
        """Put the end of a group's time on the log. Return the place of its only `rollout.timeout`."""
        ack = await self._broker.publish(msgspec.structs.replace(event, at=now_us()))
        return Place(ack.seq, 0)

    def _timeout(self, key: GroupKey) -> GroupTimedOut:
        return GroupTimedOut(**key._asdict(), timeout_s=self._config.timeout_s)


def names_group(delivery: Delivery, event: TrajectoryCompleted) -> bool:
    """Return whether a completion was delivered on a subject of its group, as `GroupLog.read` finds it."""
    own = event.subject()
    at = delivery.subject.replace(_MOVED, _COMPLETED, 1)
    return at == own or at.startswith(f"{own}.")  # a dead letter that is delivered again has one more token
