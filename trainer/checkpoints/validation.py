"""Rewards of validation runs by the step that sampled them, and which checkpoint they prove the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from journeywork.statistics import Sample
from pipeline.events import GroupScored
from trainer.checkpoints.checkpoint import Best

_STEPS = 1000
"""Steps whose rewards are remembered; those of the oldest are forgotten."""


class Validation:
    """The rewards of validation members of groups, which are never trained, and the best step by them."""

    def __init__(self, best: Best | None, min_trajectories: int) -> None:
        """`best` is the best step of the trainer before this one; a step needs `min_trajectories` to become it."""
        self.best, self._min_trajectories = best, min_trajectories
        self._rewards: dict[int, list[float]] = {}

    def record(self, groups: Iterable[GroupScored]) -> bool:
        """Count the rewards of groups that were not counted before: of runs that one version played from begin to end.
        Returns whether `best` changed."""
        steps = set()
        for group in groups:
            for member in group.members:
                if member.split == "val" and member.outcome == "scored" and member.first_step == member.last_step:
                    self._rewards.setdefault(member.last_step, []).append(member.reward)
                    steps.add(member.last_step)
        before = self.best
        for step in sorted(steps):
            self._compare(step, self._rewards[step])
        while len(self._rewards) > _STEPS:
            del self._rewards[min(self._rewards)]
        return self.best != before

    def _compare(self, step: int, rewards: Sequence[float]) -> None:
        """Make a step the best one if the 95 % interval of the difference of the means lies above 0."""
        if not step or len(rewards) < self._min_trajectories:
            return
        best, own = self.best, Sample.of(rewards)
        # With fewer of its own rewards than before, the log no longer holds those of before.
        knows_more = best is not None and best.step == step and best.rewards.count <= own.count
        if best is None or knows_more or own.difference(best.rewards)[0] > 0:
            self.best = Best(step, own)

    def metrics(self) -> dict[str, float]:
        """Metrics of the newest step with rewards."""
        if not self._rewards:
            return {}
        step = max(self._rewards)
        rewards = self._rewards[step]
        return {"val_step": float(step), "val_reward_mean": fmean(rewards), "val_trajectories": float(len(rewards))}
