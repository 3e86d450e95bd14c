"""Every loss and correction against its literal formula: loss and gradient with respect to each token's logprob, in
float64.

`test_losses.py` compares with TRL's trainer, over whole batches."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from pipeline.config import TrainerConfig
from pipeline.config.trainer import LossType
from tests.kits.settings import with_values
from tests.trainer import formulas
from tests.trainer.kit import exchange
from trainer.batches.examples import Example
from trainer.engine.loss import policy_loss
from trainer.engine.loss_inputs import inputs_of
from trainer.sequences import build

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LENGTHS = (3, 5, 2, 4, 6, 1)


def cases() -> list[dict[str, Any]]:
    plain = [
        {"loss.type": loss_type, "loss.importance_sampling": correction, "loss.beta": beta}
        for loss_type in get_args(LossType)
        for correction in CORRECTIONS
        for beta in (0.0, 0.1)
        if not (loss_type == "vespo" and correction.startswith("sequence"))
    ]
    return [
        *plain,
        {"loss.importance_level": "sequence", "loss.importance_sampling": "none"},
        {"loss.type": "luspo", "loss.importance_level": "sequence", "loss.importance_sampling": "none"},
        {"loss.delta": 1.3, "loss.importance_sampling": "none"},
        {"loss.epsilon": 0.1, "loss.epsilon_high": 0.6, "loss.importance_sampling": "none"},
        {"loss.type": "cispo", "loss.epsilon_high": 1.1, "loss.importance_sampling": "none"},
        {"loss.off_policy_mask": 0.01, "loss.importance_sampling": "none"},
        {"loss.off_policy_mask": 0.01},
        {"loss.importance_clip_min": 0.7, "loss.importance_sampling": "token_truncate"},
        {"loss.importance_clip_min": 0.7, "loss.importance_sampling": "token_mask"},
        {"loss.importance_clip_min": 0.7, "loss.importance_sampling": "sequence_mask"},
        {"loss.beta": 0.1, "loss.kl_unbiased": False, "loss.importance_sampling": "none"},
        {"loss.entropy_coef": 0.05},
        {"loss.type": "grpo", "loss.entropy_coef": 0.05},
        {"loss.type": "dr_grpo", "loss.max_completion_length": 77},
        {
            "loss.type": "sapo",
            "loss.importance_sampling": "none",
            "loss.options": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        },
        {"loss.type": "vespo", "loss.options": {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}},
    ]


@pytest.mark.parametrize("updates", ["one", "several"])
@pytest.mark.parametrize("settings", cases(), ids=lambda s: " ".join(f"{v}" for v in s.values()))
def test_loss_and_gradient_equal_the_literal_formulas(settings: dict[str, Any], updates: str) -> None:
    """Of the only update of a step, and of a later one, where the policy has moved since the step began."""
    config = with_values(TrainerConfig(), {"loss.importance_clip": 1.4} | settings)
    rng = np.random.default_rng(3)
    examples, current, base, entropies = [], [], [], []
    for i, n in enumerate(LENGTHS):
        # Recorded logprobs are float32, so both sides start from the same numbers.
        sampled = rng.uniform(-3, -1, n).astype(np.float32)
        (sequence,) = build(f"t{i}", [exchange(f"t{i}", 0, [5, 6], list(range(7, 7 + n)), logprobs=sampled.tolist())])
        advantage = float(np.float32(rng.normal()))
        old = sampled.astype(np.float64) + rng.normal(0, 0.3, n) if updates == "several" else None
        examples.append(Example(sequence, advantage, old_logprobs=old))
        current.append(sampled.astype(np.float64) + rng.normal(0, 0.3, n))
        base.append(sampled.astype(np.float64) + rng.normal(0, 0.3, n))
        entropies.append(rng.uniform(0.5, 2.0, n))

    def padded(rows: list[np.ndarray]) -> torch.Tensor:
        out = torch.zeros(len(rows), max(LENGTHS), dtype=torch.float64)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.from_numpy(row)
        return out

    mine = padded(current).requires_grad_()
    given = inputs_of(
        examples,
        mine,
        config=config,
        sequences=len(LENGTHS),
        tokens=sum(LENGTHS),
        reference_SK=padded(base) if config.loss.beta else None,
    )
    found, _ = policy_loss(config.loss, given, mine, padded(entropies))
    found.backward()

    theirs = padded(current).requires_grad_()
    replies = [
        formulas.Reply(
            e.advantage,
            [theirs[i, t] for t in range(n)],
            e.sequence.logprobs[e.sequence.loss_mask].astype(np.float64).tolist(),
            base[i].tolist(),
            [torch.tensor(h, dtype=torch.float64) for h in entropies[i]],
            None if e.old_logprobs is None else e.old_logprobs.tolist(),
        )
        for i, (e, n) in enumerate(zip(examples, LENGTHS, strict=True))
    ]
    want = formulas.loss(replies, config)
    want.backward()
    near = 1e-10  # the terms are of size 1, and both sides compute in float64
    assert found.item() == pytest.approx(want.item(), rel=0, abs=near)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert float(theirs.grad.abs().max()) > 1e-4
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=near)
