"""From the examples of a pass to the inputs of its loss (`trainer.engine.loss`); `trainer.engine.passes` computes it.

Shape letters as in `trainer.engine.loss`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.config import TrainerConfig
from trainer.batches.examples import Example
from trainer.engine.loss import LossInputs, importance_weights


def inputs_of(
    examples: Sequence[Example],
    logprobs_SK: torch.Tensor,
    *,
    config: TrainerConfig,
    sequences: int,
    tokens: int,
    reference_SK: torch.Tensor | None = None,
) -> LossInputs:
    """Return the inputs of the loss. They hold only the trained tokens; the context is in the logprobs already.
    `logprobs_SK`: those of the live adapter; `sequences`, `tokens`: of the whole update; `reference_SK`: logprobs of
    the base model, with a KL term.

    With `importance_sampling = "none"` PPO's clipped ratio compares with the recorded logprobs. Otherwise it compares
    with the policy before the step's first update (`Example.old_logprobs`), and the importance weight is that policy's
    ratio to the sampler, so both are the same in every update of the step. In a step of one update the old policy is
    the current one, and the clipped ratio is 1."""
    device = logprobs_SK.device
    mask_SK = np.zeros(logprobs_SK.shape, np.float32)
    sampled_SK = np.full(logprobs_SK.shape, np.nan, np.float32)
    old_SK = logprobs_SK.detach().clone()
    for row, example in enumerate(examples):
        sequence = example.sequence
        n = sequence.trained_tokens
        mask_SK[row, :n] = 1.0
        sampled_SK[row, :n] = sequence.logprobs[sequence.loss_mask]
        if example.old_logprobs is not None:
            old_SK[row, :n] = torch.from_numpy(example.old_logprobs)
    mask, sampled = torch.from_numpy(mask_SK).to(device), torch.from_numpy(sampled_SK).to(device)
    advantages = _advantages(examples, old_SK, config)
    weights = None
    correction = config.loss.importance_sampling
    if correction == "none":
        # A token without a recorded logprob is compared with the old policy.
        old_SK = torch.where(sampled.isnan(), old_SK, sampled)
    else:
        clip = config.loss.importance_clip
        weights = importance_weights(old_SK, sampled, mask, correction, clip)
        if any(e.late for e in examples):
            late_weights_S1 = importance_weights(old_SK, sampled, mask, "sequence_truncate", clip)
            late_S1 = torch.tensor([[e.late] for e in examples], device=device)
            weights = torch.where(late_S1, late_weights_S1, weights)
    return LossInputs(mask, advantages, old_SK, weights, reference_SK, sequences, tokens)


def _advantages(examples: Sequence[Example], old_SK: torch.Tensor, config: TrainerConfig) -> torch.Tensor:
    """Return the advantages times the weights of the trajectories: of each sequence, [S, 1]; or of each token, [S, K],
    if calls have advantages of their own or a KL penalty or a teacher's logprobs are added.

    `old_SK`: logprobs by the policy before the step."""
    dtype = torch.promote_types(old_SK.dtype, torch.float32)
    weighted_S1 = torch.tensor([[e.advantage * e.weight] for e in examples], dtype=dtype, device=old_SK.device)
    teaches = config.distill.divergence == "sampled" and any(e.teacher for e in examples)
    calls_differ = any(e.call_advantages is not None for e in examples)
    if examples[0].kl_penalty is None and not teaches and not calls_differ:
        return weighted_S1
    advantages_SK = weighted_S1.repeat(1, old_SK.shape[1])
    for row, example in enumerate(examples):
        if example.call_advantages is not None:
            calls = torch.from_numpy(example.call_advantages * example.weight).to(advantages_SK)
            advantages_SK[row, : len(calls)] = calls
        if example.kl_penalty is not None:
            penalty = torch.from_numpy(example.kl_penalty * example.weight).to(advantages_SK)
            advantages_SK[row, : len(penalty)] += penalty
        if teaches and example.teacher is not None:
            teacher = torch.from_numpy(example.teacher.logprobs_k).to(advantages_SK)
            # NaN: the teacher was not asked about the token.
            gap = teacher - old_SK[row, : len(teacher)]
            gap = torch.where(gap.isfinite(), gap, 0.0)
            advantages_SK[row, : len(teacher)] += config.distill.weight * example.weight * gap
    return advantages_SK


def distillation_loss(
    examples: Sequence[Example], divergences_SK: torch.Tensor, given: LossInputs, config: TrainerConfig
) -> torch.Tensor:
    """Return this pass's part of the mean divergence from the teacher over the batch's trained tokens, in nats, with
    the weights of the trajectories, the importance weights of the inputs and `trainer.distill.weight`."""
    weights_S1 = torch.tensor([[e.weight] for e in examples]).to(divergences_SK)
    weighted = weights_S1 * divergences_SK * given.mask_SK
    if given.weights is not None:
        weighted = weighted * given.weights
    return config.distill.weight * weighted.sum() / max(given.tokens, 1)
