"""From a scored group to what trains: who counts, what each is worth, and why a group trains nothing.

The baseline and the spread come from scored members of the training split only; what infrastructure broke, what is
masked and what is there for validation neither trains nor moves the baseline.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.config import TrainerConfig
from pipeline.events import GroupScored, Member
from trainer.batches.sequences import TokenSequence

EQUAL = 1e-6
"""Rewards closer than this are the same: a judge's sums carry rounding."""
_STD_FLOOR = 1e-4

Reason = Literal["too_small", "no_variance", "stale", "history_gone", "validation", "repeated"]


@dataclass(frozen=True)
class Refusal:
    """Why a group trains nothing."""

    reason: Reason
    detail: str


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence with the advantage of its trajectory."""

    sequence: TokenSequence
    advantage: float
    weight: float = 1.0
    """Factor on the advantage that evens out long and short trajectories (`trainer.weighting`)."""


@dataclass(frozen=True, eq=False)
class PreparedGroup:
    """A group that trains."""

    event: GroupScored
    sequences: tuple[TokenSequence, ...]
    advantages: Mapping[str, float]
    """Reward minus baseline by trajectory, not scaled yet."""
    std: float
    """Sample standard deviation of the rewards."""


def trainable_members(group: GroupScored) -> list[Member]:
    return [
        m for m in group.members if m.outcome == "scored" and m.split == "train" and np.isfinite(m.reward)
    ]


def staleness_bound(group: GroupScored, config: TrainerConfig) -> int:
    """How many steps ago a token of the group may have been sampled; nothing is too old in an offline group."""
    return sys.maxsize if group.offline else config.max_staleness


def refuse_by_event(group: GroupScored, step: int, max_staleness: int) -> Refusal | None:
    """Why the group can't train at `step`, as far as the event alone tells."""
    members = trainable_members(group)
    if group.members and all(m.split == "val" for m in group.members):
        return Refusal("validation", "every member is there for validation")
    if len(members) < 2:
        return Refusal("too_small", f"{len(members)} scored member(s) of the training split; 2 are compared")
    rewards = [m.reward for m in members]
    if max(rewards) - min(rewards) <= EQUAL:
        return Refusal("no_variance", f"all {len(members)} rewards are {rewards[0]:.6g}")
    newest = max(m.last_step for m in members)
    if step - newest > max_staleness:
        return Refusal("stale", f"newest token of step {newest}, trained from {step}, bound {max_staleness}")
    return None


def bound_staleness(
    sequences: Sequence[TokenSequence], step: int, max_staleness: int
) -> tuple[list[TokenSequence], int]:
    """The sequences with over-old tokens as context (those left without any are dropped), and how many tokens that
    were."""
    kept: list[TokenSequence] = []
    stale = 0
    for sequence in sequences:
        old = sequence.loss_mask & (step - sequence.steps.astype(np.int64) > max_staleness)
        if count := int(old.sum()):
            stale += count
            sequence = sequence.without(old)
        if sequence.loss_mask.any():
            kept.append(sequence)
    return kept, stale


def prepare(group: GroupScored, sequences: Sequence[TokenSequence]) -> PreparedGroup:
    """Advantages of a group that `refuse_by_event` let through."""
    members = trainable_members(group)
    rewards: npt.NDArray[np.float64] = np.array([m.reward for m in members], np.float64)
    baseline = float(rewards.mean())
    counted = {m.trajectory for m in members}
    return PreparedGroup(
        group,
        tuple(s for s in sequences if s.trajectory in counted),
        {m.trajectory: float(m.reward - baseline) for m in members},
        float(rewards.std(ddof=1)),
    )


def examples(groups: Sequence[PreparedGroup], config: TrainerConfig) -> list[Example]:
    """Every sequence of the batch with its scaled advantage, group after group."""
    if config.advantage_scaling == "batch":
        everything = [m.reward for g in groups for m in trainable_members(g.event)]
        batch_std = float(np.std(everything, ddof=1))
    else:
        batch_std = 0.0
    weights = _weights(groups, config)
    out = []
    for group in groups:
        match config.advantage_scaling:
            case "group":
                divisor = group.std + _STD_FLOOR
            case "batch":
                divisor = batch_std + _STD_FLOOR
            case "none":
                divisor = 1.0
        out += [
            Example(s, group.advantages[s.trajectory] / divisor, weights.get(s.trajectory, 1.0))
            for s in group.sequences
        ]
    return out


def _weights(groups: Sequence[PreparedGroup], config: TrainerConfig) -> dict[str, float]:
    """Factors that make every trajectory's part of the loss the same size, with mean 1 over what the loss averages."""
    if config.weighting == "loss":
        return {}
    parts: dict[str, int] = {}
    # Losses that average over sequences count a trajectory once per sequence, the others once per token.
    per_sequence = config.loss_type in ("grpo", "sapo")
    for group in groups:
        for s in group.sequences:
            parts[s.trajectory] = parts.get(s.trajectory, 0) + (1 if per_sequence else s.trained_tokens)
    mean = sum(parts.values()) / len(parts) if parts else 1.0
    return {trajectory: mean / n for trajectory, n in parts.items()}
