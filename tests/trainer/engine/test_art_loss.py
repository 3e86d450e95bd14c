"""The loss that a program written for ART asks for, against ART's formula written out: loss and gradient in float64."""

import dataclasses

import numpy as np
import pytest
import torch

from journeywork.art.dev import loss_settings
from pipeline.config import TrainerConfig, with_batch_settings
from tests.trainer import kit
from trainer.batches.examples import Example, make_examples
from trainer.engine.engine import with_kl_penalty
from trainer.engine.loss import policy_loss
from trainer.engine.loss_inputs import inputs_of
from trainer.sequences import build

REWARDS = ((0.0, 1.0, 0.25), (0.5, 0.5, 2.0))
LENGTHS = ((3, 5, 2), (4, 6, 1))


def art_loss(kl_penalty: float, new: list[torch.Tensor], old: list[np.ndarray], base: list[np.ndarray]) -> torch.Tensor:
    """ART's loss of a batch, in its terms: a weight of 1 / length for each token, normalised to a mean of 1, and
    advantages normalised to a weighted mean of 1."""
    advantages: list[float] = []
    for rewards in np.array(REWARDS):
        # The trainer divides by the sample's deviation, as TRL does; ART by the population's.
        advantages += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).tolist()
    lengths = [len(row) for row in new]
    weights = [1 / n for n in lengths for _ in range(n)]
    mean_weight = sum(weights) / len(weights)
    weights = [w / mean_weight for w in weights]
    per_token = [a for a, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    scale = sum(abs(a) * w for a, w in zip(per_token, weights, strict=True)) / len(weights)
    kl = [float(v) for row, b in zip(new, base, strict=True) for v in (row.detach().numpy() - b)]
    mean_kl = sum(kl) / len(kl)
    total, place = torch.zeros((), dtype=torch.float64), 0
    for row, recorded in zip(new, old, strict=True):
        ratios = (row - torch.from_numpy(recorded)).exp().clamp(0.0, 5.0)
        for t in range(len(row)):
            advantage = per_token[place] / scale + kl_penalty * (mean_kl - kl[place])
            total = total - ratios[t].detach() * advantage * row[t] * weights[place]
            place += 1
    return total / place


@pytest.mark.parametrize("kl_penalty", [0.0, 0.3])
def test_a_step_is_trained_with_the_loss_that_was_asked_for(kl_penalty: float) -> None:
    config = with_batch_settings(TrainerConfig(), loss_settings(kl_penalty))
    rng = np.random.default_rng(3)
    groups, old, new, base = [], [], [], []
    for g, (rewards, lengths) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        sequences = []
        for i, n in enumerate(lengths):
            recorded = rng.uniform(-3, -1, n).astype(np.float32)
            exchange = kit.exchange(f"g{g}-{i}", 0, [5, 6], list(range(7, 7 + n)), logprobs=recorded.tolist())
            sequences += build(f"g{g}-{i}", [exchange])
            old.append(recorded.astype(np.float64))
            new.append(old[-1] + rng.normal(0, 0.4, n))
            base.append(old[-1] + rng.normal(0, 0.4, n))
        groups.append(kit.training_group(kit.group(f"g{g}", rewards), sequences, g + 1))
    batch: list[Example] = [dataclasses.replace(e) for e in make_examples(groups, config)]
    if config.loss.kl_penalty:
        scores = dict(enumerate(new))
        batch = with_kl_penalty(batch, scores, dict(enumerate(base)), config.loss.kl_penalty)
    width = max(map(len, new))
    mine = torch.zeros(len(new), width, dtype=torch.float64)
    for row, values in enumerate(new):
        mine[row, : len(values)] = torch.from_numpy(values)
    mine.requires_grad_()
    given = inputs_of(batch, mine, config=config, sequences=len(new), tokens=sum(map(len, new)))
    loss, _ = policy_loss(config.loss, given, mine, torch.ones_like(mine))
    loss.backward()

    theirs = [torch.from_numpy(row.copy()).requires_grad_() for row in new]
    expected = art_loss(kl_penalty, theirs, old, base)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for row, values in enumerate(theirs):
        assert mine.grad is not None
        assert values.grad is not None
        np.testing.assert_allclose(mine.grad[row, : len(values)], values.grad, rtol=1e-10, atol=1e-12)
