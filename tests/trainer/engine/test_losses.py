"""Parity: on the same tokens our loss and gradients are those of TRL's GRPOTrainer over a padded batch.

The reference below is TRL's trainer with TRL's own tensors (prompts padded on the left, completions on the right,
tool tokens masked) and arguments that each case spells out by TRL's names, so that a setting of ours that is mapped
wrongly shows. Only its fused LM head, a GPU kernel, is replaced by plain logits.

Both sides compute in float64. A loss is a small difference of large terms: in float32 two correct orders of summation
differ by more than any tolerance that would still find a mistake, and by how much depends on the processor."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from benchmarks.trainer import padded_rows, trl_arguments, trl_needs
from pipeline.config import LossConfig, TrainerConfig
from pipeline.config.trainer import LossType
from tests.kits.settings import with_values
from tests.trainer.engine.kit import Configure
from tests.trainer.kit import VOCAB, backward, exchange, stir
from trainer.batches.examples import Example
from trainer.distillation.teacher import TeacherLogprobs
from trainer.engine.engine import Engine
from trainer.engine.loss import LossInputs, importance_weights, policy_loss
from trainer.engine.loss_inputs import inputs_of
from trainer.sequences import build
from trainer.trl_trainers import trl_imports

with trl_imports():
    from trl import GRPOConfig, GRPOTrainer


class PaddedGRPOTrainer(GRPOTrainer):
    """TRL's, with the logprobs computed from all logits of the padded batch."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *_: Any, **__: Any
    ) -> Any:
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions).logits
        logprobs = torch.log_softmax(logits[:, :-1].double(), -1)[:, -logits_to_keep:]
        chosen = logprobs.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return chosen, -(logprobs.exp() * logprobs).sum(-1), None


@pytest.fixture(autouse=True)
def _stirred(engine: Engine, configured: Configure) -> None:
    stir(engine)


def batch(seed: int = 0) -> list[Example]:
    """Single replies and two-turn conversations with a tool result between, of unequal length."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return list(map(int, rng.integers(2, VOCAB, int(rng.integers(low, high)))))

    out = []
    for i in range(6):
        name = f"t{i}"
        prompt, reply = some(3, 9), some(2, 6)
        exchanges = [exchange(name, 0, prompt, reply, logprobs=rng.uniform(-4, -2, len(reply)).tolist())]
        if i % 2:
            tool, last = some(1, 5), some(2, 6)
            exchanges.append(
                exchange(name, 1, prompt + reply + tool, last, logprobs=rng.uniform(-4, -2, len(last)).tolist())
            )
        (sequence,) = build(name, exchanges)
        out.append(Example(sequence, float(rng.normal())))
    return out


def reference_inputs(examples: list[Example]) -> dict[str, torch.Tensor]:
    out = padded_rows(examples, sum(e.sequence.trained_tokens for e in examples))
    out["advantages"] = torch.tensor([e.advantage for e in examples], dtype=torch.float64)
    out["before"] = torch.zeros(out["completion_ids"].shape, dtype=torch.float64)
    for before, e in zip(out["before"], examples, strict=True):
        if e.old_logprobs is not None:
            trained = np.flatnonzero(e.sequence.loss_mask)
            before[trained - trained[0]] = torch.from_numpy(e.old_logprobs)
    return out


def reference(engine: Engine, args: GRPOConfig, beta: float, examples: list[Example]) -> float:
    """TRL's loss of the batch; its gradient is added to the engine's parameters."""
    trainer = PaddedGRPOTrainer(model=engine.model.peft, args=args, **trl_needs())
    # Not by the arguments: with them the constructor would make a second adapter, and would start vLLM.
    trainer.beta = beta
    trainer.use_vllm = args.vllm_importance_sampling_correction
    trainer.current_gradient_accumulation_steps = 1
    engine.model.peft.train()
    inputs = reference_inputs(examples)
    sampled, before = inputs.pop("sampled"), inputs.pop("before")
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    keep = inputs["completion_ids"].size(1)
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(engine.model.peft, ids, attention, keep)
        if beta:
            with engine.model.peft.disable_adapter():
                base, _, _ = trainer._get_per_token_logps_and_entropies(engine.model.peft, ids, attention, keep)
            inputs["ref_per_token_logps"] = base
    if examples[0].old_logprobs is None:  # the step's only update
        before = current
    if not args.vllm_importance_sampling_correction:
        inputs["old_per_token_logps"] = torch.where(mask.bool(), sampled, before)
    else:
        # As TRL does after generation with vLLM.
        mode = args.vllm_importance_sampling_mode
        high = args.vllm_importance_sampling_clip_max
        difference = (before - sampled) * mask
        if "sequence" in mode:
            difference = difference.sum(-1, keepdim=True)
        ratio = difference.exp()
        ratio = ratio.clamp(max=high) if "truncate" in mode else torch.where(ratio > high, 0.0, ratio)
        inputs["importance_sampling_ratio"] = ratio
        inputs["old_per_token_logps"] = before
    loss = trainer.compute_loss(engine.model.peft, inputs)
    loss.backward()
    return float(loss.detach())


CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

ON: dict[str, Any] = {
    "loss_type": "dapo",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
"""TRL's arguments for our defaults with `loss.importance_clip` 2."""
OFF: dict[str, Any] = {"loss_type": "dapo", "vllm_importance_sampling_correction": False}


@pytest.mark.parametrize("updates", ["one", "several"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_loss_equals_trl_s_own_computation(
    engine: Engine, tmp_path: Path, loss_type: str, correction: str, beta: float, updates: str
) -> None:
    """Every loss type, correction and KL weight, of the only update of a step and of a later one, where the policy has
    moved since the step began."""
    theirs = (OFF if correction == "none" else ON | {"vllm_importance_sampling_mode": correction}) | {
        "loss_type": loss_type,
        "epsilon_high": 5.0 if loss_type == "cispo" else None,
    }
    settings = {"loss.type": loss_type, "loss.importance_sampling": correction, "loss.beta": beta}
    assert_parity(engine, settings, theirs, tmp_path, moved=updates == "several")


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (
            {"loss.entropy_coef": 0.05, "loss.type": loss_type},
            ON | {"entropy_coef": 0.05, "loss_type": loss_type, "epsilon_high": 5.0 if loss_type == "cispo" else None},
        )
        for loss_type in get_args(LossType)
    ),
    ({"loss.importance_clip": 1.2}, ON | {"vllm_importance_sampling_clip_max": 1.2}),
    ({"loss.epsilon": 0.9, "loss.importance_sampling": "none"}, OFF | {"epsilon": 0.9}),
    ({"loss.epsilon_high": 5.0, "loss.importance_sampling": "none"}, OFF | {"epsilon_high": 5.0}),
    (
        {"loss.importance_level": "sequence", "loss.importance_sampling": "none"},
        OFF | {"importance_sampling_level": "sequence"},
    ),
    (
        {"loss.max_completion_length": 100, "loss.type": "dr_grpo"},
        ON | {"max_completion_length": 100, "loss_type": "dr_grpo"},
    ),
]


@pytest.mark.parametrize(("options", "theirs"), PAIRS, ids=lambda v: str(v)[:60])
def test_loss_equals_trl_s_own_computation_with_options(
    engine: Engine, tmp_path: Path, options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Each option, mapped as spelled out, and each makes a difference."""
    gradients = assert_parity(engine, options, theirs, tmp_path)
    kept = ("loss.type", "loss.beta", "loss.importance_sampling")
    engine.configure(with_values(TrainerConfig(), BATCH | {k: v for k, v in options.items() if k in kept}))
    engine.model.peft.zero_grad()
    backward(engine, batch(), [0] * 6, 0)
    assert gradients != pytest.approx([float(p.grad.norm()) for p in engine.model.parameters], rel=1e-3)


BATCH: dict[str, Any] = {
    "lora.rank": 4,
    "dtype": "float64",
    "memory.tokens_per_batch": 40,
    "loss.importance_clip": 2.0,
    "memory.packing": "padded",
}


def assert_parity(
    engine: Engine, settings: dict[str, Any], theirs: dict[str, Any], tmp_path: Path, *, moved: bool = False
) -> list[float]:
    """Compare loss and gradients under our `settings` with TRL's under `theirs`; returns the gradients' norms. `moved`:
    the policy has moved since the step began."""
    config = with_values(TrainerConfig(), BATCH | settings)
    engine.configure(config)
    examples = batch()
    if moved:
        rng = np.random.default_rng(1)
        examples = [
            dataclasses.replace(e, old_logprobs=rng.uniform(-4, -2, e.sequence.trained_tokens)) for e in examples
        ]
    engine.model.peft.zero_grad()
    # The KL of TRL is set by hand on its trainer: see `reference`.
    args = trl_arguments(tmp_path, use_cpu=True, **{"use_bias_correction_kl": True} | theirs)
    their_loss = reference(engine, args, config.loss.beta, examples)
    their_gradients = [p.grad.clone() for p in engine.model.parameters]
    engine.model.peft.zero_grad()
    metrics = backward(engine, examples, [0] * len(examples), 0)
    assert metrics["micro_batches"] > 1
    assert metrics["loss"] == pytest.approx(their_loss, rel=1e-9, abs=1e-12)
    for mine, other in zip(engine.model.parameters, their_gradients, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float64
        torch.testing.assert_close(mine.grad, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()))
    return [float(g.norm()) for g in their_gradients]


def test_an_unknown_sampler_logprob_counts_as_ratio_one() -> None:
    current = torch.tensor([[-1.0, -2.0]])
    sampled = torch.tensor([[float("nan"), -3.0]])
    ratio = importance_weights(current, sampled, torch.ones(1, 2), "token_truncate", 2.0)
    assert ratio.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_unknown_logprobs_do_not_poison_the_gradient(engine: Engine, configured: Configure, correction: str) -> None:
    configured({"loss.importance_sampling": correction})
    engine.model.peft.zero_grad()
    (sequence,) = build("t", [exchange("t", 0, [5, 6], [7, 8], logprobs=[float("nan"), -2.0])])
    metrics = backward(engine, [Example(sequence, 1.0)], [0], 0)
    assert np.isfinite(metrics["loss"])
    assert all(torch.isfinite(p.grad).all() for p in engine.model.parameters)


def given(advantages: list[float], width: int, **more: torch.Tensor) -> LossInputs:
    """A sequence of as many trained tokens as it has advantages, in a row of `width`."""
    n = len(advantages)
    row = torch.tensor([[*advantages, *[0.0] * (width - n)]])
    mask = (torch.arange(width) < n).float()[None]
    old = torch.full((1, width), -1.0)
    inputs: dict[str, Any] = {"old_SK": old, "weights": None, "reference_SK": None} | more
    return LossInputs(mask, row, **inputs, sequences=1, tokens=n)


def test_a_metric_of_sequences_counts_their_tokens_whatever_the_advantages_shape() -> None:
    config = LossConfig(importance_level="sequence")
    logprobs, entropies = torch.zeros(1, 4), torch.zeros(1, 4)
    whole = given([1.0] * 4, 4)
    of_sequence = dataclasses.replace(whole, advantages=whole.advantages[:, :1])
    sums = [policy_loss(config, inputs, logprobs, entropies)[1] for inputs in (whole, of_sequence)]
    assert sums[0] == sums[1]
    assert sums[0]["clip_ratio/high_mean"] == (4.0, 4.0)


def test_a_teacher_that_rules_a_token_out_leaves_the_step_finite() -> None:
    (sequence,) = build("t", [exchange("t", 0, [5], [7, 8], logprobs=[-1.0, -1.0])])
    none = np.zeros((2, 0))
    teacher_logprobs = TeacherLogprobs(np.array([-np.inf, -0.5]), none.astype(np.int64), none)
    config = with_values(TrainerConfig(), {"distill.weight": 1.0})
    inputs = inputs_of(
        [Example(sequence, 0.5, teacher=teacher_logprobs)],
        torch.full((1, 2), -1.0),
        config=config,
        sequences=1,
        tokens=2,
    )
    assert inputs.advantages.tolist() == [[0.5, 1.0]]
