"""One policy's training state between steps, and what a step gives."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.batches.sequences import TokenSequence

Weights = dict[str, torch.Tensor]
"""An adapter: PEFT's parameter names to tensors."""


class UntrainableError(ArithmeticError):
    """A batch from which no step can be taken; nothing was changed."""

    reason = "untrainable"
    """Of the dead letters that its groups become."""


class SamplerMismatchError(UntrainableError):
    """The sampler's recorded logprobs are not those of the version that is said to have sampled: what would be trained is not
    what was played."""

    reason = "sampler_mismatch"


@dataclass(eq=False)
class TrainState:
    """One policy's training state between steps."""

    step: int
    weights: Weights
    optimizer: dict[str, Any] | None = None
    """`None` where nothing was trained yet, or the state was lost."""
    scheduler: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    history: dict[int, Weights] = field(default_factory=dict)
    """Adapters of the newest steps, to recompute logprobs at the very version that sampled."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The state after one step, and what was measured on the way."""

    state: TrainState
    metrics: dict[str, float]
    dropped: tuple[TokenSequence, ...] = ()
    """Sequences that were left out, since memory does not hold a pass of any of them alone."""


def get_rng() -> dict[str, Any]:
    """The state of the random generators that training may draw from."""
    version, internal, gauss = random.getstate()
    return {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}


def set_rng(state: Mapping[str, Any] | None) -> None:
    """Go on from what `get_rng` returned; `None` leaves the generators as they are."""
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
