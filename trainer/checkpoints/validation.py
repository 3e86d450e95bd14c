"""Rewards of validation runs by the step that sampled them, and which checkpoint they prove the best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.events import GroupScored
from trainer.checkpoints.checkpoint import Best

_STEPS = 1000
"""Steps whose rewards are remembered; those of the oldest are forgotten."""


@dataclass
class Rewards:
    """Number and mean of rewards, the sum of their squared differences from it, and their range."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, reward: float) -> None:
        """Welford's update."""
        self.count += 1
        difference = reward - self.mean
        self.mean += difference / self.count
        self.squares += difference * (reward - self.mean)
        self.least, self.greatest = min(self.least, reward), max(self.greatest, reward)

    def best(self, step: int) -> Best:
        """Return them as the rewards of a step."""
        variance = self.squares / (self.count - 1) if self.count > 1 else None
        return Best(step, self.mean, self.count, variance, self.least, self.greatest)


class Validation:
    """The rewards of validation members of groups, which are never trained, and the best step by them."""

    def __init__(self, best: Best | None, min_trajectories: int) -> None:
        """`best` is the best step of the trainer before this one; a step needs `min_trajectories` to become it."""
        self.best, self._min_trajectories = best, min_trajectories
        self._rewards: dict[int, Rewards] = {}

    def record(self, groups: Iterable[GroupScored]) -> bool:
        """Count the rewards of groups, each given once. Returns whether `best` changed."""
        steps = set()
        for group in groups:
            for member in group.members:
                if member.split == "val" and member.outcome == "scored" and member.first_step == member.last_step:
                    self._rewards.setdefault(member.last_step, Rewards()).add(member.reward)
                    steps.add(member.last_step)
        before = self.best
        for step in sorted(steps):
            self._compare(step, self._rewards[step])
        while len(self._rewards) > _STEPS:
            del self._rewards[min(self._rewards)]
        return self.best != before

    def _compare(self, step: int, rewards: Rewards) -> None:
        if not step or rewards.count < self._min_trajectories:
            return
        candidate = rewards.best(step)
        best = self.best
        if best is None or best.beaten_by(candidate):
            self.best = candidate
        elif best.step == step and best.trajectories <= candidate.trajectories:
            # More of its own rewards; with fewer, the log no longer holds those of before.
            self.best = candidate

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest step with rewards."""
        if not self._rewards:
            return {}
        step = max(self._rewards)
        rewards = self._rewards[step]
        return {"val_step": float(step), "val_reward_mean": rewards.mean, "val_trajectories": float(rewards.count)}
