"""Reverse KL divergence over a teacher's most probable tokens, with a last bin for all other tokens.

Shape letters: n positions, K tokens that the teacher's logprobs are known of.
"""

from __future__ import annotations

import torch

_MOST = -1e-7
"""Largest logprob of the K tokens together, so that the last bin is never empty."""


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
