"""Metrics of a step that its groups give, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.events import Member
from trainer.batches.groups import GroupWithHistory


def group_metrics(
    batch: Sequence[GroupWithHistory], discarded_rewards: Sequence[float], equal_groups: int
) -> dict[str, float]:
    """Metrics of a step's groups, and of those that were discarded since the step before."""
    members = [m for g in batch for m in g.members]
    rewards = np.array([m.reward for m in members], np.float64)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_mean_all": float(np.mean([*rewards, *discarded_rewards])),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "groups": float(len(batch)),
        "no_variance_share": equal_groups / (equal_groups + len(batch)),
        "trajectories": float(len(members)),
        "tokens_stale": float(sum(g.stale_tokens for g in batch)),
        "tokens_unjudged": float(sum(g.history.unjudged_tokens for g in batch)),
        "tokens_left_out": float(sum(g.history.left_out.total() for g in batch)),
        "hints": float(sum(g.history.hints for g in batch)),
        "hints_unused": float(sum(g.history.hints_unused for g in batch)),
        **_run_metrics(members),
    }


def _run_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Return the mean of each metric that agents gave to runs, over the runs that have it, as `run/<name>`."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.metrics.items():
            values.setdefault(f"run/{name}", []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}
