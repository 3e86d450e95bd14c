"""The groups of a model that wait for a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio

from pipeline.config import TrainerConfig
from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, TrainingBatch
from pipeline.log.broker import Broker
from pipeline.log.subjects import subject_filter
from pipeline.names import is_name
from trainer.batches.groups import TrainingGroup
from trainer.batches.histories import Histories
from trainer.batches.tasks import EarlierRuns
from trainer.engine.state import UntrainableError
from trainer.learner import Learner


@dataclass(eq=False)
class RequestedBatch:
    """Groups that their agent wants to be trained together, in a step of their own."""

    request: TrainingBatch
    groups: list[TrainingGroup] = field(default_factory=list)
    """Those that wait, in stream order."""
    settled: set[str] = field(default_factory=set)
    """Names of the groups that wait or were discarded."""
    changed: float = field(default_factory=anyio.current_time)
    """When the last of its groups began to wait or was discarded, in the event loop's time."""

    @property
    def key(self) -> tuple[str, str]:
        """Its owner and id, by which it is known."""
        return self.request.owner, self.request.id

    @property
    def complete(self) -> bool:
        return self.settled.issuperset(self.request.groups)


@dataclass(eq=False)
class ModelQueue:
    """The groups of one model that wait for a step."""

    learner: Learner
    histories: Histories
    waiting: deque[TrainingGroup] = field(default_factory=deque)
    """The waiting groups of no requested batch, in stream order."""
    requested: dict[tuple[str, str], RequestedBatch] = field(default_factory=dict)
    """The requested batches by owner and id, in the order in which their first group came."""
    batch: list[TrainingGroup] = field(default_factory=list)
    """The groups of the step that is being filled, computed or committed."""
    request: TrainingBatch | None = None
    """The request that `batch` is for; `None` for a step of any groups."""
    earlier_runs: dict[float, EarlierRuns] = field(default_factory=dict)
    """By `loss.turn_discount`, which a requested batch may choose: those of the discounts with which a group was
    compared with them (`trainer.loss.baseline`)."""

    @property
    def step(self) -> int:
        return self.learner.state.step

    @property
    def settings(self) -> TrainerConfig:
        return self.learner.settings

    def settings_of(self, request: TrainingBatch | None) -> TrainerConfig:
        """The settings of a step for `request`. Where those that it chose can't be used, they are the trainer's; its
        step is refused then."""
        try:
            return self.learner.settings_for(request)
        except UntrainableError:
            return self.settings

    @property
    def finished(self) -> bool:
        return 0 < self.settings.max_steps <= self.step

    @property
    def full(self) -> bool:
        """Whether there are enough groups for a step, if none of them is refused."""
        if any(batch.complete for batch in self.requested.values()):
            return True
        return len(self.batch) + len(self.waiting) >= self.settings.groups_per_step

    @property
    def first_seq(self) -> int:
        """Stream sequence of the first group held here; 0 if none is."""
        return next((group.place.seq for group in self.groups()), 0)

    def groups(self) -> Iterator[TrainingGroup]:
        """Yield all groups that wait or are in the batch."""
        yield from self.waiting
        yield from self.batch
        for batch in self.requested.values():
            yield from batch.groups

    def add(self, group: TrainingGroup) -> None:
        """Queue a group in stream order. A redelivered group may come behind newer ones."""
        request = group.event.batch
        if request is None:
            index = _index(self.waiting, group)
            self.waiting.insert(index, group)
            return
        batch = self.requested[request.owner, request.id]
        batch.groups.insert(_index(batch.groups, group), group)
        batch.settled.add(group.event.group)
        batch.changed = anyio.current_time()

    async def begin_requested(self, event: GroupScored, broker: Broker, consumer: str) -> None:
        """Begin the requested batch of a group, if it is the first one of it here. Groups of the batch that were
        discarded before, or are dead letters of `consumer`, count as settled."""
        request = event.batch
        if request is None or (request.owner, request.id) in self.requested:
            return
        batch = self.requested[request.owner, request.id] = RequestedBatch(request)
        names = [name for name in request.groups if is_name(name)]
        batch.settled.update(set(request.groups).difference(names))  # no group can have such a name
        for name in names:
            keys: dict[str, Any] = {"project": event.project, "model": event.model, "group": name}
            discards = await broker.read(GroupDiscarded, **keys)
            where = event.branch, event.split
            if any(
                (e.branch, e.split) == where and e.reason != "too_large" for e in (r.event for r in discards)
            ):
                batch.settled.add(name)
        letters = await broker.read(DeadLettered, stream="GROUPS", consumer=consumer)
        subjects = [letter.event.original_subject for letter in letters]
        for name in names:
            prefix = subject_filter(GroupScored, project=event.project, model=event.model, group=name)
            if any(subject.startswith(prefix.removesuffix(">")) for subject in subjects):
                batch.settled.add(name)

    def settle(self, event: GroupScored) -> None:
        """Let the requested batch of a discarded group go on without it."""
        request = event.batch
        batch = self.requested.get((request.owner, request.id)) if request is not None else None
        if batch is None:
            return
        batch.settled.add(event.group)
        batch.changed = anyio.current_time()
        batch.groups = [group for group in batch.groups if group.event.group != event.group]
        if not batch.groups:
            del self.requested[batch.key]  # the next group of it, if there is one, begins it again

    def incomplete(self) -> list[RequestedBatch]:
        """Return the requested batches that are not complete, oldest first."""
        return [batch for batch in self.requested.values() if not batch.complete]

    def take_complete_batch(self) -> bool:
        """Make the first complete requested batch the batch of the next step. Returns whether there is one."""
        complete = next((b for b in self.requested.values() if b.complete), None)
        if complete is None:
            return False
        self.waiting.extendleft(reversed(self.batch))  # groups of a step that was not full yet
        self.batch, self.request = complete.groups, complete.request
        del self.requested[complete.key]
        return True


def _index(groups: deque[TrainingGroup] | list[TrainingGroup], group: TrainingGroup) -> int:
    index = len(groups)
    while index and groups[index - 1].place.seq > group.place.seq:
        index -= 1
    return index
