"""The groups of a model that wait for a step.

The intake (`trainer.intake`) puts groups into `ModelQueue.waiting`, or into a requested batch. For a step, the service
(`trainer.service`) makes some of them candidates, has their exchanges read, and moves those that can train into the
batch. The others are discarded.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.concurrency.concurrently import concurrently
from pipeline.config import TrainerConfig
from pipeline.events import GroupScored, TrainingBatch
from trainer.batches.groups import AdmittedGroup, GroupWithHistory, Refusal
from trainer.batches.histories import Histories
from trainer.batches.tasks import EarlierRuns
from trainer.engine.state import UntrainableError
from trainer.learner import Learner
from trainer.requested import RequestedBatches


@dataclass(eq=False)
class Batch:
    """The groups of a step that is being filled, computed or committed."""

    groups: list[GroupWithHistory] = field(default_factory=list)
    request: TrainingBatch | None = None
    """`None` for a step of any groups."""


@dataclass(eq=False)
class ModelQueue:
    """The groups of one model that wait for a step."""

    learner: Learner
    histories: Histories
    requested: RequestedBatches
    waiting: deque[AdmittedGroup] = field(default_factory=deque)
    """The waiting groups of no requested batch, in stream order."""
    read_ahead: dict[AdmittedGroup, GroupWithHistory] = field(default_factory=dict)
    """Those of them whose exchanges are read."""
    candidates: list[AdmittedGroup] = field(default_factory=list)
    """Groups on their way from the queue to the batch."""
    batch: Batch = field(default_factory=Batch)
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
        if self.requested.complete is not None:
            return True
        return len(self.batch.groups) + len(self.waiting) >= self.settings.groups_per_step

    def groups(self) -> Iterator[AdmittedGroup]:
        """Yield all groups that wait or are in the batch."""
        yield from self.waiting
        yield from (group.admitted for group in self.batch.groups)
        yield from self.candidates
        yield from self.requested.groups()

    def find(self, event: GroupScored) -> AdmittedGroup | None:
        """Return the group with the name of an event that is held here: the event was delivered again, or the group was
        scored again after the log lost its first event. `None` if there is none."""
        for group in self.groups():
            # Names first: thousands of groups may wait, and a subject takes time to build.
            if group.event.group == event.group and group.event.subject() == event.subject():
                return group
        return None

    def add(self, group: AdmittedGroup) -> None:
        """Queue a group in stream order. That of a requested batch has begun it (`RequestedBatches.begin`)."""
        if group.event.batch is None:
            # A redelivered group may come behind newer ones.
            insort(self.waiting, group, key=lambda other: other.place.seq)
        else:
            self.requested.add(group.event.batch, group)

    def take_requested(self) -> bool:
        """Make the groups of the first complete requested batch the candidates of the next step. Returns whether there
        is one."""
        complete = self.requested.take_complete()
        if complete is None:
            return False
        # Groups of a step that was not full yet.
        self.waiting.extendleft(group.admitted for group in reversed(self.batch.groups))
        self.read_ahead |= {group.admitted: group for group in self.batch.groups}
        self.batch, self.candidates = Batch(request=complete.request), complete.groups
        return True

    def take_waiting(self) -> bool:
        """Make waiting groups the candidates for what the batch lacks. Returns whether there are any."""
        missing = self.settings.groups_per_step - len(self.batch.groups)
        self.candidates = [self.waiting.popleft() for _ in range(min(missing, len(self.waiting)))]
        return bool(self.candidates)

    def drop(self, group: AdmittedGroup) -> None:
        """Take a refused group out of the candidates or the batch."""
        self.candidates = [g for g in self.candidates if g is not group]
        self.batch.groups = [g for g in self.batch.groups if g.admitted is not group]

    async def read_candidates(self) -> list[tuple[AdmittedGroup, GroupWithHistory | Refusal]]:
        """Read the exchanges of the candidates, where they are not read yet."""
        groups = self.candidates
        read = await concurrently(self._read, groups)
        for group in groups:
            self.read_ahead.pop(group, None)
        return list(zip(groups, read, strict=True))

    async def read_next(self) -> None:
        """Read the exchanges of the groups that the next step probably trains, while this one is computed. A group that
        is refused stays in the queue: its turn finds that out again, and discards it."""
        groups = list(self.waiting)[: self.settings.groups_per_step]
        for group, read in zip(groups, await concurrently(self._read, groups), strict=True):
            if isinstance(read, GroupWithHistory):
                self.read_ahead[group] = read

    async def _read(self, group: AdmittedGroup) -> GroupWithHistory | Refusal:
        return self.read_ahead.get(group) or await self.histories.read(group)
