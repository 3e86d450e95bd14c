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
    """Waiting groups whose exchanges were read before their turn."""
    candidates: list[AdmittedGroup] = field(default_factory=list)
    """Groups on their way from the queue to the batch."""
    batch: Batch = field(default_factory=Batch)
    earlier_runs: dict[float, EarlierRuns] = field(default_factory=dict)
    """The earlier runs that groups are compared with (`trainer.loss.baseline`), by `loss.turn_discount`, which a
    requested batch may choose."""

    @property
    def step(self) -> int:
        return self.learner.state.step

    @property
    def settings(self) -> TrainerConfig:
        """The trainer's settings for the model, without those that a requested batch chooses."""
        return self.learner.settings

    def settings_of(self, request: TrainingBatch | None) -> TrainerConfig:
        """The settings of a step for `request`. If it chose settings that can't be used, these are the trainer's: the
        step itself refuses the request."""
        try:
            return self.learner.settings_for(request)
        except UntrainableError:
            return self.settings

    @property
    def finished(self) -> bool:
        """Whether the model has reached `trainer.max_steps`; 0 means no limit."""
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
        """Return the group of this queue that has the event's name; `None` if there is none. There is one if the event
        was delivered again, or if the group was scored again after the log lost its first event."""
        for group in self.groups():
            # Names first: thousands of groups may wait, and a subject takes time to build.
            if group.event.group == event.group and group.event.subject() == event.subject():
                return group
        return None

    def add(self, group: AdmittedGroup) -> None:
        """Queue a group in stream order. For a group of a requested batch, `RequestedBatches.begin` was called."""
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
        # The groups of a step that was not full yet wait again.
        self.waiting.extendleft(group.admitted for group in reversed(self.batch.groups))
        self.read_ahead |= {group.admitted: group for group in self.batch.groups}
        self.batch, self.candidates = Batch(request=complete.request), complete.groups
        return True

    def take_waiting(self) -> bool:
        """Take as many waiting groups as the batch lacks out of the queue, and make them the candidates. Returns
        whether there are any."""
        missing = self.settings.groups_per_step - len(self.batch.groups)
        self.candidates = [self.waiting.popleft() for _ in range(min(missing, len(self.waiting)))]
        return bool(self.candidates)

    def drop(self, group: AdmittedGroup) -> None:
        """Take a refused group out of the candidates or the batch."""
        self.candidates = [g for g in self.candidates if g is not group]
        self.batch.groups = [g for g in self.batch.groups if g.admitted is not group]

    async def read_candidates(self) -> list[tuple[AdmittedGroup, GroupWithHistory | Refusal]]:
        """Return each candidate with its history, or with the reason why the history can't be read."""
        groups = self.candidates
        results = await concurrently(self._read, groups)
        for group in groups:
            self.read_ahead.pop(group, None)
        return list(zip(groups, results, strict=True))

    async def read_next(self) -> None:
        """Read the exchanges of the groups that the next step probably trains. A group whose exchanges can't be read
        stays in the queue, and is discarded at its turn."""
        groups = list(self.waiting)[: self.settings.groups_per_step]
        for group, result in zip(groups, await concurrently(self._read, groups), strict=True):
            if isinstance(result, GroupWithHistory):
                self.read_ahead[group] = result

    async def _read(self, group: AdmittedGroup) -> GroupWithHistory | Refusal:
        """Return the group with its history, or why that can't be read; without the log if it was read before."""
        return self.read_ahead.get(group) or await self.histories.read(group)
