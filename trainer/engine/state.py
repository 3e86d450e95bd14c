"""One policy's training state between steps, what a step returns, and the errors of batches that can't be trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer.sequences import TokenSequence

Weights = dict[str, torch.Tensor]
"""An adapter: PEFT's parameter names to tensors."""

Logprobs = np.ndarray[Any, np.dtype[np.floating[Any]]]
"""Logprobs of a sequence's trained tokens, [k] in nats."""


class UntrainableError(ArithmeticError):
    """No step can be taken from a batch; nothing was changed."""

    reason = "untrainable"
    """The reason in the dead letters that the batch's groups become."""


class SamplerMismatchError(UntrainableError):
    """The recorded logprobs are not those of the version that is recorded as the sampler, so the batch would train
    tokens that this version did not sample."""

    reason = "sampler_mismatch"


@dataclass(eq=False)
class TrainState:
    """One policy's training state between steps."""

    step: int
    weights: Weights
    """The adapter as it is published, in the published type: what samplers load."""
    optimizer: dict[str, Any] | None = None
    """`None` if nothing was trained yet, or the state was lost."""
    history: dict[int, Weights] = field(default_factory=dict)
    """The published adapters of the newest steps, by step: logprobs are recomputed at the version that sampled."""
    master: Weights | None = None
    """The weights that the optimizer updates, if `weights` are rounded; `None` if both are the same."""
    average: Weights | None = None
    """Average of the adapters so far (`trainer.distill.teacher`); `None`: `weights`."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The state after a step, and the step's metrics."""

    state: TrainState
    metrics: dict[str, float]
    dropped: tuple[TokenSequence, ...] = ()
    """Sequences that were left out because memory does not hold a pass of any of them alone."""
