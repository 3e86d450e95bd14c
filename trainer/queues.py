"""The groups of a model that wait for a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pipeline.config import TrainerConfig
from trainer.batches.groups import TrainingGroup
from trainer.batches.histories import Histories
from trainer.learner import Learner


@dataclass(eq=False)
class ModelQueue:
    """The groups of one model that wait for a step."""

    learner: Learner
    histories: Histories
    waiting: deque[TrainingGroup] = field(default_factory=deque)
    """The waiting groups, in stream order."""
    batch: list[TrainingGroup] = field(default_factory=list)
    """The groups of the step that is being filled, computed or committed."""

    @property
    def step(self) -> int:
        return self.learner.state.step

    @property
    def settings(self) -> TrainerConfig:
        return self.learner.settings

    @property
    def finished(self) -> bool:
        return 0 < self.settings.max_steps <= self.step

    @property
    def full(self) -> bool:
        """Whether there are enough groups for a step, if none of them is refused."""
        return len(self.batch) + len(self.waiting) >= self.settings.groups_per_step
