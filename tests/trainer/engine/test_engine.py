"""Engine: steps, their measurements, and lines of several policies over one model."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.config import (
    ConfigError,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    with_values,
)
from tests.trainer.engine.kit import batch, sampled_by
from tests.trainer.kit import VOCAB, backward, exactly, settings
from trainer.batches.groups import Example
from trainer.batches.packing import Layout
from trainer.engine import checks
from trainer.engine.engine import Engine
from trainer.engine.state import SamplerMismatchError, TrainState, UntrainableError
from trainer.learner import _shape


@pytest.fixture(scope="module")
def engine(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    config = TrainerConfig(
        dtype="float64", lora=LoraConfig(rank=4), optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    return exactly(Engine(tiny_base, config, tmp_path_factory.mktemp("scratch")))


def test_recorded_logprobs_are_recomputed_at_the_version_that_sampled(engine: Engine) -> None:
    state = engine.initial_state()
    old = batch(engine, state)
    for _ in range(2):
        state = engine.step(state, batch(engine, state, seed=50), [0] * 6).state
    fresh = batch(engine, state, seed=90)
    metrics = engine.step(state, [*old, *fresh], [0] * 12).metrics
    assert metrics["sampler_logprob_diff"] < 1e-5
    assert metrics["sampler_logprob_checked"] > 0
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (2, 1)
    # The old ones did move: it is the version that makes the difference small.
    assert abs(metrics["ratio_max"] - 1) > 1e-3


def test_the_kl_to_the_base_model_is_measured_without_a_kl_term_too(engine: Engine) -> None:
    state = engine.initial_state()
    state = engine.step(state, batch(engine, state), [0] * 6).state
    examples = batch(engine, state, seed=40)
    measured = engine.step(state, examples, [0] * 6).metrics["kl"]
    config = engine.config
    engine.configure(with_values(config, {"loss.beta": 1e-9}))
    in_the_loss = engine.step(state, examples, [0] * 6).metrics["kl"]
    engine.configure(config)
    assert measured == pytest.approx(in_the_loss, rel=1e-4)
    assert measured > 1e-6


def test_tokens_recorded_under_a_wrong_version_fail_the_step(engine: Engine) -> None:
    state = engine.initial_state()
    for i in range(2):
        state = engine.step(state, batch(engine, state, seed=20 * i), [0] * 6).state
    wrong = [Example(sampled_by(engine, state, f"t{i}", i, step=0), 1.0) for i in range(4)]
    with pytest.raises(
        SamplerMismatchError, match=r"step 3 is not taken: .* differ by .* at the versions that sampled"
    ):
        engine.step(state, wrong, [0] * 4)
    config = engine.config
    engine.configure(msgspec.structs.replace(config, logprob_bound=10.0))
    assert engine.step(state, wrong, [0] * 4).metrics["sampler_logprob_diff"] > 1e-3
    engine.configure(config)


def test_every_token_of_the_current_version_is_compared_with_the_sampler(engine: Engine) -> None:
    """Beyond the few sequences that are recomputed: what the passes compute anyway says it for all of them."""
    state = engine.initial_state()
    examples = batch(engine, state)
    metrics = engine.step(state, examples, [0] * 6).metrics
    assert metrics["on_policy_logprob_diff_max"] < 1e-5
    wrong = [
        Example(dataclasses.replace(e.sequence, logprobs=e.sequence.logprobs - 0.01), 1.0) for e in examples
    ]
    config = engine.config
    engine.configure(msgspec.structs.replace(config, check_sequences=0))
    with pytest.raises(
        SamplerMismatchError, match=r"differ by 0\.01 nats on average of tokens sampled by this version"
    ):
        engine.step(state, wrong, [0] * 6)
    engine.configure(config)


def test_the_check_uses_the_layout_of_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the check looked at padded rows while prefix trees were trained."""
    state = engine.initial_state()
    examples = batch(engine, state)
    original = Layout.dense_mask

    def shifted(self: Layout, *args: Any) -> Any:
        mask = original(self, *args)
        return None if mask is None else mask & (torch.arange(mask.shape[-1]) != 3)

    config = engine.config
    engine.configure(with_values(config, {"memory.packing": "prefix"}))
    monkeypatch.setattr(Layout, "dense_mask", shifted)
    monkeypatch.setattr("trainer.engine.engine.SamplerMismatchError", RuntimeError)
    with pytest.raises(RuntimeError, match="at the versions that sampled"):
        engine.step(state, examples, [0] * 6)
    engine.configure(with_values(config, {"memory.packing": "padded"}))
    engine.step(state, examples, [0] * 6)
    engine.configure(config)


def test_an_abandoned_step_does_not_change_the_state(engine: Engine) -> None:
    start = engine.step(engine.initial_state(), batch(engine, engine.initial_state()), [0] * 6).state
    kept = copy.deepcopy(start)
    examples = batch(engine, start, seed=30)
    first = engine.step(start, examples, [0] * 6).state
    engine.step(start, batch(engine, start, seed=60), [0] * 6)  # computed and thrown away
    again = engine.step(start, examples, [0] * 6).state
    for name, tensor in kept.weights.items():
        torch.testing.assert_close(start.weights[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(first.weights[name], again.weights[name], rtol=0, atol=0)
    assert first.step == again.step == 2


def test_policies_over_one_model_do_not_touch_each_other(engine: Engine) -> None:
    def course(seed: int, other: bool) -> TrainState:
        state, noise = engine.initial_state(), engine.initial_state()
        for i in range(3):
            state = engine.step(state, batch(engine, state, seed + 10 * i), [0] * 6).state
            if other:
                noise = engine.step(noise, batch(engine, noise, 500 + i), [0] * 6).state
        return state

    start = engine.initial_state()
    engine.load_adapter(start.weights)
    one = course(0, other=False)
    engine.load_adapter(start.weights)
    two = course(0, other=True)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, two.weights[name], rtol=0, atol=0)


def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(engine: Engine) -> None:
    state = engine.initial_state()
    examples = batch(engine, state)
    examples[0] = Example(examples[0].sequence, float("inf"))
    with pytest.raises(UntrainableError, match="not taken"):
        engine.step(state, examples, [0] * 6)


def test_logits_of_large_vocabularies_are_computed_in_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = batch(engine, engine.initial_state())

    def gradient() -> list[torch.Tensor]:
        engine.model.zero_grad()
        backward(engine, examples, [0] * 6, 0)
        return [p.grad.clone() for p in engine.parameters]

    whole = gradient()
    monkeypatch.setattr("trainer.engine.model._VOCAB_CHUNK", 4 * VOCAB)
    for mine, other in zip(gradient(), whole, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_first_adapter_depends_on_the_seed_alone(tiny_base: str, tmp_path: Path) -> None:
    torch.manual_seed(123)
    one = Engine(tiny_base, TrainerConfig(seed=5, lora=LoraConfig(rank=4)), tmp_path).weights()
    torch.manual_seed(321)
    two = Engine(tiny_base, TrainerConfig(seed=5, lora=LoraConfig(rank=4)), tmp_path).weights()
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_an_adapter_of_another_shape_is_refused(engine: Engine, tiny_base: str, tmp_path: Path) -> None:
    other = Engine(tiny_base, TrainerConfig(lora=LoraConfig(rank=2)), tmp_path)
    with pytest.raises(ValueError, match=r"lora\.rank"):
        engine.load_adapter(other.weights())


def test_policies_share_an_engine_only_if_the_model_is_loaded_with_equal_settings(
    tiny_base: str, tmp_path: Path
) -> None:
    def engines(**changed: Any) -> int:
        base = settings(tiny_base, tmp_path)
        one, other = (
            ModelConfig(name="a", base=tiny_base),
            ModelConfig(name="b", base=tiny_base, trainer=changed),
        )
        return len({_shape(base, one), _shape(base, other)})

    assert engines(groups_per_step=7, optimizer={"learning_rate": 1.0}) == 1
    for name, value in (
        ("dtype", "bfloat16"),
        ("unsloth", {"load_in_4bit": True}),
        ("unsloth", {"max_seq_length": 9}),
        ("lora", {"targets": ["q_proj"]}),
    ):
        assert engines(**{name: value}) == 2, value
    engine = Engine(tiny_base, TrainerConfig(lora=LoraConfig(rank=4, targets=("q_proj", "v_proj"))), tmp_path)
    assert {n.split(".")[-3] for n in engine.weights()} == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"dtype, lora\.targets can't be changed once the model is loaded"):
        engine.configure(TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=4)))
    with pytest.raises(
        ConfigError,
        match=r"lora\.targets: q_prj can't have an adapter; layers of this model that can: down_proj, gate_proj",
    ):
        Engine(tiny_base, TrainerConfig(lora=LoraConfig(targets=("q_prj",))), tmp_path)


def test_warming_up_changes_nothing(tiny_base: str, tmp_path: Path) -> None:
    config = TrainerConfig(lora=LoraConfig(rank=4))
    warm, cold = Engine(tiny_base, config, tmp_path), Engine(tiny_base, config, tmp_path)
    warm.warm_up()
    examples = batch(cold, cold.initial_state())
    one = warm.step(warm.initial_state(), examples, [0] * 6).state
    two = cold.step(cold.initial_state(), examples, [0] * 6).state
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)


def test_a_nan_of_the_trainer_fails_the_comparison_with_the_sampler(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every NaN counted as a logprob that the sampler had not recorded."""
    state = engine.initial_state()
    examples = batch(engine, state)
    unknown = examples[0].sequence.logprobs.copy()
    unknown[-1] = np.nan  # the sampler recorded no logprob of this token: it is not compared
    examples[0] = Example(dataclasses.replace(examples[0].sequence, logprobs=unknown), 1.0)
    packing = engine.packing_of(examples, [0] * 6)
    engine.load_adapter(state.weights)
    found = checks.sampler_logprob_difference(engine, state, examples, [0] * 6, packing, 1024)
    assert found["sampler_logprob_diff_max"] < 1e-5
    assert found["sampler_logprob_checked"] == 6 * 5 - 1
    original = Engine.logprobs

    def broken(self: Engine, *args: Any, **kwargs: Any) -> Any:
        logprobs, rest = original(self, *args, **kwargs)
        logprobs[0, 0] = torch.nan
        return logprobs, rest

    monkeypatch.setattr(Engine, "logprobs", broken)
    found = checks.sampler_logprob_difference(engine, state, examples, [0] * 6, packing, 1024)
    assert np.isnan(found["sampler_logprob_diff"])
    assert np.isnan(found["sampler_logprob_diff_max"])
    with pytest.raises(SamplerMismatchError, match="differ by nan nats"):
        engine._require_sampler_logprobs(found, 0)
