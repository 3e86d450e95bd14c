"""Groups that wait to be trained, by model in stream order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pipeline.config import TrainerConfig
from pipeline.events import GroupScored
from pipeline.log.broker import Delivery
from pipeline.log.place import Place
from trainer.batches.sequences import TokenSequence
from trainer.learner import Learner


@dataclass(eq=False)
class Held:
    """A queued group. `delivery` is None for one that was read from the log at start and not delivered yet."""

    event: GroupScored
    place: Place
    delivery: Delivery | None
    sequences: list[TokenSequence] | None = None
    """Of all scored training members; None: not fetched yet."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that are not trained because of how they were sampled, by the settings that did it; known once fetched."""
    duration_s: float = 0.0
    """From the first call of its longest trajectory to the last answer; known once fetched."""


@dataclass(eq=False)
class Queue:
    """One model's waiting groups."""

    learner: Learner
    waiting: deque[Held]
    batch: list[Held]
    """Groups of the step that is being computed or committed."""

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
        """Whether there may be enough groups for a step."""
        return len(self.batch) + len(self.waiting) >= self.settings.groups_per_step
