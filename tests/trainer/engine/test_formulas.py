"""Every loss and correction against its literal formula: loss and gradient with respect to each token's logprob, in float64.

`test_grpo.py` compares with TRL's trainer, whose code is in both sides; here nothing is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import TrainerConfig
from tests.trainer import formulas
from tests.trainer.kit import exchange
from trainer.batches.groups import Example
from trainer.batches.sequences import build
from trainer.engine import losses as grpo
from trainer.engine.engine import Engine

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LENGTHS = (3, 5, 2, 4, 6, 1)


@pytest.fixture(scope="module")
def engine(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tiny_base, TrainerConfig(lora_rank=4), tmp_path_factory.mktemp("scratch"))


def cases() -> list[dict[str, Any]]:
    plain = [
        {"loss_type": loss_type, "sampler_correction": correction, "beta": beta}
        for loss_type in grpo.LOSS_TYPES
        for correction in CORRECTIONS
        for beta in (0.0, 0.1)
        if not (loss_type == "vespo" and correction.startswith("sequence"))
    ]
    return [
        *plain,
        {"importance_level": "sequence", "sampler_correction": "none"},
        {"loss_type": "luspo", "importance_level": "sequence", "sampler_correction": "none"},
        {"delta": 1.3, "sampler_correction": "none"},
        {"epsilon": 0.1, "epsilon_high": 0.6, "sampler_correction": "none"},
        {"loss_type": "cispo", "epsilon_high": 1.1, "sampler_correction": "none"},
        {"off_policy_mask": 0.01, "sampler_correction": "none"},
        {"off_policy_mask": 0.01},
        {"correction_min": 0.7, "sampler_correction": "token_truncate"},
        {"correction_min": 0.7, "sampler_correction": "token_mask"},
        {"correction_min": 0.7, "sampler_correction": "sequence_mask"},
        {"beta": 0.1, "kl_unbiased": False, "sampler_correction": "none"},
        {"entropy_coef": 0.05},
        {"loss_type": "grpo", "entropy_coef": 0.05},
        {"loss_type": "dr_grpo", "max_completion_length": 77},
        {
            "loss_type": "sapo",
            "sampler_correction": "none",
            "loss_options": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        },
        {"loss_type": "vespo", "loss_options": {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}},
    ]


@pytest.mark.parametrize("settings", cases(), ids=lambda s: " ".join(f"{v}" for v in s.values()))
def test_loss_and_gradient_are_the_formulas(engine: Engine, settings: dict[str, Any]) -> None:
    config = TrainerConfig(**{"lora_rank": 4, "correction_max": 1.4, "seed": 0} | settings)
    engine.configure(config)
    rng = np.random.default_rng(3)
    examples, current, base, entropies = [], [], [], []
    for i, n in enumerate(LENGTHS):
        # Recorded logprobs are float32, so both sides start from the same numbers.
        sampled = rng.uniform(-3, -1, n).astype(np.float32)
        (sequence,) = build(
            f"t{i}", [exchange(f"t{i}", 0, [5, 6], list(range(7, 7 + n)), logprobs=sampled.tolist())]
        )
        examples.append(Example(sequence, float(np.float32(rng.normal()))))
        current.append(sampled.astype(np.float64) + rng.normal(0, 0.3, n))
        base.append(sampled.astype(np.float64) + rng.normal(0, 0.3, n))
        entropies.append(rng.uniform(0.5, 2.0, n))

    def padded(rows: list[np.ndarray]) -> torch.Tensor:
        out = torch.zeros(len(rows), max(LENGTHS), dtype=torch.float64)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.from_numpy(row)
        return out

    mine = padded(current).requires_grad_()
    inputs = grpo.inputs_of(
        examples, range(len(examples)), mine, config=config, items_in_batch=sum(LENGTHS),
        reference_SK=padded(base) if config.beta else None,
    )  # fmt: skip
    found = engine.trainer.loss(inputs, mine, padded(entropies))
    found.backward()

    theirs = padded(current).requires_grad_()
    replies = [
        formulas.Reply(
            e.advantage,
            [theirs[i, t] for t in range(n)],
            e.sequence.logprobs[e.sequence.loss_mask].astype(np.float64).tolist(),
            base[i].tolist(),
            [torch.tensor(h, dtype=torch.float64) for h in entropies[i]],
        )
        for i, (e, n) in enumerate(zip(examples, LENGTHS, strict=True))
    ]
    want = formulas.loss(replies, config)
    want.backward()
    # The terms are of size 1, and both sides compute in float64; only SAPO's temperatures are float32 in TRL.
    near = 1e-6 if config.loss_type == "sapo" else 1e-10
    assert found.item() == pytest.approx(want.item(), rel=0, abs=near)
    assert mine.grad is not None
    assert theirs.grad is not None
    assert float(theirs.grad.abs().max()) > 1e-4
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=near)
