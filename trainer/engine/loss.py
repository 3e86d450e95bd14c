"""The losses, of tokens that were sampled elsewhere. `trainer.engine.loss_inputs` makes their inputs of examples.

| `trainer.loss.type` | paper | averaged over |
| --- | --- | --- |
| `grpo` | DeepSeekMath, arXiv 2402.03300: PPO's clip (1707.06347) | sequences of their tokens' means |
| `bnpo`, `dapo` | the same, by DAPO, 2503.14476 | tokens of the batch |
| `dr_grpo` | the same, by Dr. GRPO, 2503.20783 | sequences, of sums over `max_completion_length` |
| `cispo` | MiniMax-M1, 2506.13585: the ratio is bounded and a constant | tokens of the batch |

Tests compare each with TRL's `GRPOTrainer`.

Shape letters: S sequences, K most trained tokens in one of them, 1 one number for all; of a teacher: n positions, K
tokens that its logprobs are known of. Logprobs are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pipeline.config import LossConfig

CISPO_BOUND = 5.0
"""Bound on CISPO's ratio where `epsilon_high` is not set."""

Sums = dict[str, tuple[float, float]]
"""For each metric its sum over tokens, and the number of tokens. Those of several passes are added."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """A pass, and the size of the batch that it is a part of. Losses of the batch's passes add up to its loss."""

    mask_SK: torch.Tensor
    """1 for a trained token, 0 for padding."""
    advantages: torch.Tensor
    """[S, 1], or [S, K] if tokens of a sequence differ."""
    old_SK: torch.Tensor
    """Logprobs by the policy that the probability ratio compares with."""
    weights: torch.Tensor | None
    """Importance weights, [S, 1] or [S, K]: the policy before the step over the sampler. `None`: not corrected."""
    reference_SK: torch.Tensor | None
    """Logprobs by the base model, with a KL term."""
    sequences: int
    """Number of sequences of the batch."""
    tokens: int
    """Number of trained tokens of the batch."""


def policy_loss(
    config: LossConfig, given: LossInputs, logprobs_SK: torch.Tensor, entropies_SK: torch.Tensor
) -> tuple[torch.Tensor, Sums]:
    """Return this pass's part of the loss of the batch, and its metrics."""
    log_ratio_SK = logprobs_SK - given.old_SK
    ratio = log_ratio_SK.exp()  # [S, 1] from here on if it is one of sequences
    if config.importance_level == "sequence":
        ratio = _mean(log_ratio_SK, given.mask_SK).exp()
    terms, metrics = _surrogate(config, given, logprobs_SK, ratio)
    if given.weights is not None:
        terms = terms * given.weights
    if given.reference_SK is not None:  # the k3 estimate of J. Schulman, "Approximating KL divergence" (2020)
        difference_SK = given.reference_SK - logprobs_SK
        # With the ratio its gradient is that of the reverse KL divergence (DeepSeek-V3.2, arXiv 2512.02556).
        metrics["kl"] = (difference_SK.exp() - difference_SK - 1) * ratio
        terms = terms + config.beta * metrics["kl"]
    sums_S = (terms * given.mask_SK).sum(-1)
    match config.type:
        case "grpo":
            loss = (sums_S / given.mask_SK.sum(-1).clamp(min=1.0)).sum() / given.sequences
        case "dr_grpo":
            loss = sums_S.sum() / (given.sequences * config.max_completion_length)
        case _:
            loss = sums_S.sum() / max(given.tokens, 1)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * (entropies_SK * given.mask_SK).sum() / max(given.tokens, 1)
    metrics["entropy"] = entropies_SK
    return loss, _sums(metrics, given.mask_SK)


def _surrogate(
    config: LossConfig, given: LossInputs, logprobs_SK: torch.Tensor, ratio: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what each token, or each sequence, adds to the loss before it is averaged, and its metrics."""
    advantages = given.advantages
    positive = advantages > 0
    if config.type == "cispo":
        bound = CISPO_BOUND if config.epsilon_high is None else config.epsilon_high
        clipped = (ratio > bound) & positive
        return -ratio.clamp(max=bound).detach() * advantages * logprobs_SK, {"cispo_clip_ratio": clipped}
    low, high = (1 - config.epsilon, 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high))
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & positive
    metrics = {"clip_ratio/low_mean": below, "clip_ratio/high_mean": above, "clip_ratio/region_mean": below | above}
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages), metrics


def supervised_loss(given: LossInputs, logprobs_SK: torch.Tensor) -> torch.Tensor:
    """Return this pass's part of the mean negative logprob of the batch's trained tokens, weighted with the rewards in
    `advantages`."""
    return -(given.advantages * logprobs_SK * given.mask_SK).sum() / max(given.tokens, 1)


_MOST = -1e-7
"""Limit on the logprob of the K tokens together, so that the other tokens keep some probability."""


def with_tail(logprobs_nK: torch.Tensor) -> torch.Tensor:
    """Append the logprob of all other tokens together, [n, K + 1]."""
    together_n1 = torch.logsumexp(logprobs_nK, -1, keepdim=True).clamp(max=_MOST)
    return torch.cat([logprobs_nK, torch.log(-torch.expm1(together_n1))], -1)


def reverse_kl(policy_nK: torch.Tensor, teacher_nK: torch.Tensor, *, tail: bool) -> torch.Tensor:
    """Return KL(policy || teacher) in nats, [n], from logprobs of the same K tokens. Without `tail` the K tokens are
    the whole vocabulary."""
    if tail:
        policy_nK, teacher_nK = with_tail(policy_nK), with_tail(teacher_nK)
    return (policy_nK.exp() * (policy_nK - teacher_nK)).sum(-1)


def importance_weights(
    logprobs_SK: torch.Tensor, sampled_SK: torch.Tensor, mask_SK: torch.Tensor, mode: str, maximum: float
) -> torch.Tensor:
    """Return the importance weights of truncated or masked importance sampling (TIS, MIS: F. Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"), [S, K], or [S, 1] per sequence.

    `mode` is `trainer.loss.importance_sampling`. Weights above `maximum` are set to it (`…_truncate`) or to 0
    (`…_mask`). A token whose sampler logprob is NaN counts as ratio 1."""
    difference = torch.nan_to_num((logprobs_SK.detach() - sampled_SK) * mask_SK, nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, max=maximum)
    return ratio.masked_fill(ratio > maximum, 0.0)


def _mean(values_SK: torch.Tensor, mask_SK: torch.Tensor) -> torch.Tensor:
    """Return the mean over each sequence's trained tokens, [S, 1]."""
    return (values_SK * mask_SK).sum(-1, keepdim=True) / mask_SK.sum(-1, keepdim=True).clamp(min=1.0)


def _sums(metrics: dict[str, torch.Tensor], mask_SK: torch.Tensor) -> Sums:
    """Return the sum of each metric over the trained tokens, and their number, in one transfer from the device. A
    metric of sequences, [S, 1], counts once for each of a sequence's tokens."""
    parts = [(value.detach() * mask_SK).sum().double() for value in metrics.values()]
    *sums, count = torch.stack([*parts, mask_SK.sum().double()]).tolist()
    return {name: (total, count) for name, total in zip(metrics, sums, strict=True)}


def means(parts: list[Sums]) -> dict[str, float]:
    """Return the mean of each metric over all passes, without those that are not finite."""
    out = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        total, count = (sum(part[name][i] for part in parts if name in part) for i in (0, 1))
        if count and math.isfinite(total):
            out[name] = total / count
    return out
