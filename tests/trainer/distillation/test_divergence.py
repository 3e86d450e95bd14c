"""Reverse KL against the literal sum, and against TRL's own functions."""

import pytest
import torch

from trainer.engine.loss import reverse_kl
from trainer.trl_trainers import trl_imports

with trl_imports():
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo import loss_utils


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a policy and of a teacher: 7 positions, 12 tokens."""
    torch.manual_seed(seed)
    policy, teacher = 2 * torch.randn(2, 7, 12, dtype=torch.float64)
    return policy.requires_grad_(), teacher


def tops(policy: torch.Tensor, teacher: torch.Tensor, k: int, support: torch.Tensor) -> list[torch.Tensor]:
    """Logprobs of both at the k most probable tokens of `support`."""
    ids = support.topk(k, -1).indices
    return [x.log_softmax(-1).gather(-1, ids) for x in (policy, teacher)]


def assert_same(policy: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Values and gradients are the same."""
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    gradients = [torch.autograd.grad(x.sum(), policy, retain_graph=True)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


@pytest.mark.parametrize("k", [1, 4, 11])
def test_over_one_support_it_is_sdpos_loss_and_gradient(k: int) -> None:
    """SDPO takes the policy's most probable tokens; over these, value and gradient are the same."""
    policy, teacher = logits(k)
    theirs = loss_utils.compute_topk_self_distillation_loss(
        policy, teacher, distillation_topk=k, distillation_alpha=1.0, distillation_add_tail=True
    )
    ours = reverse_kl(*tops(policy, teacher, k, policy), tail=True)
    assert_same(policy, ours, theirs)


def test_the_sampled_tokens_advantage_has_the_gradient_of_sdpos_loss() -> None:
    """A policy gradient whose advantage is log teacher - log policy (`sampled`)."""
    policy, teacher = logits(3)
    ids = torch.randint(12, (7,))
    theirs = loss_utils.compute_sampled_token_self_distillation_loss(policy, teacher, ids, distillation_alpha=1.0)
    mine, its = (x.log_softmax(-1).gather(-1, ids[:, None])[:, 0] for x in (policy, teacher))
    ours = -(its - mine).detach() * mine
    assert_same(policy, ours, theirs)


def test_over_the_vocabulary_it_is_sdpos_and_gkds_loss() -> None:
    policy, teacher = logits(5)
    ours = reverse_kl(*tops(policy, teacher, 12, teacher), tail=False)
    sdpo = loss_utils.compute_full_logit_self_distillation_loss(policy, teacher, distillation_alpha=1.0)
    torch.testing.assert_close(ours, sdpo, atol=1e-6, rtol=0)
    gkd = GKDTrainer.generalized_jsd_loss(policy, teacher, beta=1.0, reduction="sum")
    torch.testing.assert_close(ours.sum(), gkd, atol=1e-6, rtol=0)
