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
        """Count the rewards of the validation runs in `groups`, which must not have been counted before. Runs that
        several versions played are left out. Returns whether `best` changed."""
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
        """Make a step the best one if the 95 % interval of the difference of its mean reward and that of the best one
        lies above 0."""
        if not step or len(rewards) < self._min_trajectories:
            return
        best, sample = self.best, Sample.of(rewards)
        # The best step itself gets its new rewards, unless they are fewer than before: the log has lost some then.
        has_more_rewards = best is not None and best.step == step and best.rewards.count <= sample.count
        if best is None or has_more_rewards or sample.difference(best.rewards)[0] > 0:
            self.best = Best(step, sample)

    def metrics(self) -> dict[str, float]:
        """Return the validation metrics of the newest step that has rewards; none if there is no such step."""
        if not self._rewards:
            return {}
        step = max(self._rewards)
        rewards = self._rewards[step]
        return {"val_step": float(step), "val_reward_mean": fmean(rewards), "val_trajectories": float(len(rewards))}
