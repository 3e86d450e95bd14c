"""Limits how many groups may be open or untrained, so that none is stale when it is trained.

Discarding stale groups wastes the sampled tokens and starves long tasks, so a new group waits instead. A group is
"ahead of the trainer" from the opening of its first trajectory until a checkpoint or a discard names it, or until it is
older than `gateway.groups_ahead_s`, because its agents may have died.

If other keys fill the limit, a key may still open its share of it: the limit divided by the number of keys that have
groups ahead. So groups that one key leaves open hold up that key alone.

All gateway processes of a project share one count. An admission is an event on the log that lists the groups ahead. The
log accepts it only if the publisher has read the previous admission (an expected last sequence). Of two simultaneous
admissions one fails; its process reads the other one and decides again. A process that starts reads the last admission.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable

from pipeline.events import CheckpointPublished, GroupAdmitted, GroupAhead, GroupDiscarded, now_us
from pipeline.log.broker import Broker, LogEntry
from pipeline.log.follow import follow_events
from pipeline.log.subjects import stream_of
from rollout_gateway.http.errors import ApiError

_MAX_WAITING = 10_000
"""Number of waiting groups whose first request is remembered. The oldest is forgotten first."""
_MAX_DONE = 100_000
"""Number of trained and discarded groups that are remembered. The oldest is forgotten first."""


class _GroupsAhead:
    """The groups of one model that are ahead of the trainer, as this process knows them."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupAhead] = {}
        """By name of the group."""
        self.done: OrderedDict[str, int] = OrderedDict()
        """Groups that were trained or discarded: by name, the stream time of the checkpoint or discard in microseconds.
        A group may be opened again afterwards."""
        self.last_seq = 0
        """Stream sequence of the newest admission that was read."""
        self.admitting = asyncio.Lock()
        """Held while a group is admitted: calls of one process need not compete on the log."""

    def apply(self, admitted: LogEntry[GroupAdmitted]) -> None:
        """Set `groups` to those in the newest admission, without groups that are done."""
        self.last_seq = admitted.seq
        event = admitted.event
        admission = GroupAhead(group=event.group, at=admitted.place.at, owner=event.owner)
        ahead = {group.group: group for group in (*event.ahead, admission)}
        self.groups = {name: group for name, group in ahead.items() if self.done.get(name, -1) < group.at}

    def mark_done(self, group: str, at: int) -> None:
        """Count a group no more: a checkpoint or a discard of stream time `at` names it."""
        self.done[group] = max(at, self.done.pop(group, 0))
        if len(self.done) > _MAX_DONE:
            self.done.popitem(last=False)
        if group in self.groups and self.groups[group].at <= at:
            del self.groups[group]


class Pacing:
    """Admits new groups while few enough are ahead of the trainer."""

    def __init__(self, project: str, broker: Broker, models: Iterable[str], *, limit: int, forget_s: float) -> None:
        """`limit`: maximum number of groups of a model that are ahead; 0 for no limit. `forget_s`: seconds after which
        a group no longer counts."""
        self._project, self._broker, self._limit = project, broker, limit
        self._forget_us = int(forget_s * 1e6)
        self._models = {model: _GroupsAhead() for model in models}
        self._waiting: dict[tuple[str, str], float] = {}
        """By model and group, when the group was first refused, by `time.monotonic`."""
        self._next_seq = 0
        """Stream sequence from which `follow` reads discards."""

    async def admit(self, model: str, group: str, split: str, owner: str) -> float:
        """Admit a trajectory of a group. Further trajectories of an admitted group are always admitted. `owner`: the
        name of the API key that opens it.

        Returns the seconds between the group's first refusal by this process and its admission; 0 for its further
        trajectories. Raises a 429 `ApiError` if too many groups are ahead, and `BrokerError` if the log does not
        answer."""
        # Other models are outside models and branches, which are not trained.
        if not self._limit or split != "train" or model not in self._models:
            return 0.0
        state = self._models[model]
        while not self._is_ahead(state, group):
            async with state.admitting:
                if self._must_refuse(state, owner):
                    await self._read(model, state)  # another process may have admitted groups or dropped old ones
                if self._is_ahead(state, group):
                    break
                if self._must_refuse(state, owner):
                    self._refuse(state, model, group, owner)
                await self._publish(model, state, group, owner)
                if group in state.groups:  # else another process published first
                    break
        since = self._waiting.pop((model, group), None)
        return 0.0 if since is None else time.monotonic() - since

    def _is_ahead(self, state: _GroupsAhead, group: str) -> bool:
        """Whether a group is admitted, and not for too long."""
        return group in state.groups and state.groups[group].at > now_us() - self._forget_us

    def _must_refuse(self, state: _GroupsAhead, owner: str) -> bool:
        """Return whether a new group of `owner`, the name of an API key, must be refused.

        It must if as many groups are ahead of the trainer as the limit allows, and `owner` has opened its share of
        them: the limit divided by the number of owners with groups ahead, itself included, and at least 1. Groups that
        no longer count, because they are older than `forget_s`, are dropped from `state` before."""
        if len(state.groups) < self._limit:
            return False
        oldest = now_us() - self._forget_us
        state.groups = {name: group for name, group in state.groups.items() if group.at > oldest}
        counts = Counter(group.owner for group in state.groups.values())
        share = max(1, self._limit // len({*counts, owner}))
        return len(state.groups) >= self._limit and counts[owner] >= share

    def _refuse(self, state: _GroupsAhead, model: str, group: str, owner: str) -> None:
        """Note when the group was first refused, and raise the 429 `ApiError`."""
        self._waiting.setdefault((model, group), time.monotonic())
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        # How many groups other keys have is not the caller's business.
        own = sum(ahead.owner == owner for ahead in state.groups.values())
        message = (
            f"{own} groups of {model} that this API key opened wait for training, and another one would be stale when "
            "it is trained. Try again later."
        )
        raise ApiError(429, "groups_ahead", message)

    # -- the log ---------------------------------------------------------------------------------------------------

    async def _publish(self, model: str, state: _GroupsAhead, group: str, owner: str) -> None:
        """Publish an admission of `group`, unless the log has a newer admission than the last one that was read. In
        either case, then read the newest one."""
        event = GroupAdmitted(
            project=self._project, model=model, group=group, owner=owner, ahead=tuple(state.groups.values())
        )
        await self._broker.publish(event, after=state.last_seq)
        await self._read(model, state)

    async def _read(self, model: str, state: _GroupsAhead) -> None:
        """Set the groups ahead of `model` to those in the newest admission on the log."""
        admitted = await self._broker.read_last(GroupAdmitted, project=self._project, model=model)
        if admitted is not None:
            state.apply(admitted)

    def mark_done(self, model: str, groups: tuple[str, ...], at: int) -> None:
        """Stop counting groups that were trained or discarded. `at`: stream time of that event in microseconds."""
        if self._limit and model in self._models:
            for group in groups:
                self._models[model].mark_done(group, at)

    async def rebuild(self) -> None:
        """Read from the log which groups are ahead. `follow` continues from the log's present end."""
        broker, project = self._broker, self._project
        self._next_seq = (await broker.stream_info(stream_of(GroupDiscarded))).state.last_seq + 1
        if not self._limit:
            return
        for trained in await broker.read(CheckpointPublished, project=project):
            self.mark_done(trained.event.model, trained.event.groups, trained.place.at)
        for model, state in self._models.items():
            await self._read(model, state)
            for group in list(state.groups):
                for discarded in await broker.read(GroupDiscarded, project=project, model=model, group=group):
                    if _ends_waiting(discarded.event):
                        state.mark_done(group, discarded.place.at)

    async def follow(self) -> None:
        """Follow discards, and stop counting their groups. Never returns."""
        discarded = follow_events(self._broker, [GroupDiscarded], lambda: self._next_seq, project=self._project)
        async for recorded in discarded:
            self._next_seq = recorded.seq + 1
            if _ends_waiting(recorded.event):
                self.mark_done(recorded.event.model, (recorded.event.group,), recorded.place.at)


def _ends_waiting(discarded: GroupDiscarded) -> bool:
    """Whether a discard means that its group does not wait for the trainer any more. Discards of other branches and
    splits do not count, nor does the reason `late`, which is about one run that came after its group."""
    return (discarded.branch, discarded.split) == ("main", "train") and discarded.reason != "late"
