"""Comparisons of a step with the sampler and with the base model: what they find, and what they cost."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.engine.kit import Configure, batch, sampled_by
from trainer.batches.examples import Example
from trainer.batches.packing import Layout
from trainer.engine import checks
from trainer.engine.engine import Engine
from trainer.engine.model import PolicyModel
from trainer.engine.state import SamplerMismatchError, TrainState


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are made in every step."""
    monkeypatch.setattr(checks, "EVERY", 1)


def sampled(engine: Engine, policy: TrainState, seed: int, count: int, step: int) -> list[Example]:
    """Examples that `policy` sampled and that are recorded as those of `step`."""
    return [Example(sampled_by(engine, policy, f"t{i}", seed + i, step), 1.0 if i % 2 else -1.0) for i in range(count)]


def after(engine: Engine, steps: int) -> list[TrainState]:
    """The states of a run of so many steps, the first one included."""
    states = [engine.initial_state()]
    for i in range(steps):
        states.append(engine.step(states[-1], batch(engine, states[-1], seed=20 * i), [0] * 6).state)
    return states


# -- what they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", [0, 1], ids=["this version", "the version before"])
def test_checks_compute_at_most_their_share_of_the_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, age: int
) -> None:
    """3 % by default, whichever version sampled the tokens."""
    tokens = {True: 0, False: 0}
    compute = PolicyModel.logprobs

    def counted(self: PolicyModel, layout: Layout, *args: Any, **kwargs: Any) -> Any:
        tokens[torch.is_grad_enabled()] += layout.tokens
        return compute(self, layout, *args, **kwargs)

    before = state = engine.initial_state()
    for i in range(2 + checks.EVERY):
        examples = sampled(engine, before if age else state, 30 * i, 24, max(0, state.step - age))
        with monkeypatch.context() as counting:
            if i > 1:
                counting.setattr(PolicyModel, "logprobs", counted)
            before, state = state, engine.step(state, examples, [n // 8 for n in range(24)]).state
    assert 0 < tokens[False] <= 0.03 * tokens[True]


# -- what they find --------------------------------------------------------------------------------------------------


@contextmanager
def no_fault(_: Engine) -> Iterator[None]:
    yield


@contextmanager
def another_base(engine: Engine) -> Iterator[None]:
    """The sampler's base model has other weights."""
    embedding = engine.model.peft.get_base_model().get_input_embeddings().weight
    before = embedding.detach().clone()
    with torch.no_grad():
        embedding.mul_(1.02)
    yield
    with torch.no_grad():
        embedding.copy_(before)


@contextmanager
def shifted_masks(_: Engine) -> Iterator[None]:
    """The trainer's attention masks miss a column."""
    original = Layout.dense_mask

    def shifted(self: Layout, *args: Any) -> Any:
        mask = original(self, *args)
        return None if mask is None else mask & (torch.arange(mask.shape[-1]) != 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "dense_mask", shifted)
        yield


Fault = Callable[[Engine], AbstractContextManager[None]]
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "wrong adapter": (no_fault, no_fault),
    "another base": (another_base, no_fault),
    "shifted mask": (no_fault, shifted_masks),
}
"""What is wrong while the sampler computes, and while the trainer does. The first is another policy that samples."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("age", "within"), [(0, 1), (1, 4)], ids=["this version", "the version before"])
def test_a_planted_fault_is_found(
    engine: Engine, configured: Configure, monkeypatch: pytest.MonkeyPatch, fault: str, age: int, within: int
) -> None:
    """Within one step if the tokens of the current version show it, else in the next step that is checked; the refused
    step leaves no trace."""
    monkeypatch.setattr(checks, "EVERY", 4)
    # Two sequences fit in the sample: one alone has no branches, and so no mask to be wrong.
    configured({"memory.packing": "prefix", "check_share": 0.3})
    groups = [0] * 3 + [1] * 3
    wrong = engine.initial_state()
    wrong.weights.update({k: w + 0.05 * torch.randn_like(w) for k, w in wrong.weights.items()})
    before = state = engine.initial_state()

    def step(planted: bool, i: int) -> TrainState:
        policy = wrong if planted and fault == "wrong adapter" else before if age else state
        while_sampling, while_training = FAULTS[fault] if planted else (no_fault, no_fault)
        with while_sampling(engine):
            examples = sampled(engine, policy, 10 * i, 6, state.step - age)
        with while_training(engine):
            return engine.step(state, examples, groups).state

    for i in range(3):
        before, state = (state, (step(False, i) if i else engine.step(state, batch(engine, state), groups).state))
    for taken in range(within):
        kept = copy.deepcopy(state)
        try:
            before, state = state, step(True, 10 + taken)
        except SamplerMismatchError as error:
            refusal = str(error)
            break
    else:
        pytest.fail(f"{fault}: not found within {within} step(s)")
    assert ("of tokens of earlier versions" if age else "of tokens sampled by this version") in refusal
    torch.testing.assert_close(state.weights, kept.weights, rtol=0, atol=0)
    torch.testing.assert_close(state.optimizer, kept.optimizer, rtol=0, atol=0)
    assert state.step == kept.step
    assert step(False, 90).step == state.step + 1


@pytest.mark.usefixtures("every_step")
def test_recorded_logprobs_are_recomputed_at_the_version_that_sampled(engine: Engine) -> None:
    first, _, state = after(engine, 2)
    old, fresh = sampled(engine, first, 0, 6, 0), sampled(engine, state, 90, 6, 2)
    metrics = engine.step(state, [*old, *fresh], [0] * 12).metrics
    assert metrics["sampler_logprob_diff"] < 1e-5
    assert metrics["sampler_logprob_checked"] > 0
    assert (metrics["staleness_max"], metrics["staleness_mean"]) == (2, 1)
    # The old ones did move: it is the version that makes the difference small.
    assert abs(metrics["ratio_max"] - 1) > 1e-3
    assert metrics["ratio_p5"] <= metrics["ratio_p50"] <= metrics["ratio_p95"] <= metrics["ratio_max"]
    assert metrics["ratio_p5"] < metrics["ratio_p95"]


def test_a_sequence_of_several_versions_is_compared_at_each(engine: Engine) -> None:
    """The tokens of other versions are context."""
    first, second, state = after(engine, 2)
    one, other = sampled_by(engine, first, "t", 5, 0), sampled_by(engine, second, "t", 5, 1)
    late = np.arange(len(one.ids)) >= len(one.ids) - 2  # the same tokens: only their logprobs differ
    mixed = dataclasses.replace(
        one, logprobs=np.where(late, other.logprobs, one.logprobs), steps=np.where(late, other.steps, one.steps)
    )
    state.step = 11  # a step in which the check is made
    step = checks.Step(state, [Example(mixed, 1.0)], [0], [], "padded", 100.0)
    metrics = checks.compare_earlier_versions(engine.passes, step, 1.0)
    assert metrics["sampler_logprob_checked"] == 5
    assert metrics["sampler_logprob_diff_max"] < 1e-5


def test_the_kl_to_the_base_model_is_measured_without_a_kl_term_too(
    engine: Engine, configured: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_MOST_RATIO", np.inf)  # the loss cuts nothing off
    state = after(engine, 1)[-1]
    examples = batch(engine, state, seed=40)
    configured({"check_share": 1.0})
    measured = engine.step(state, examples, [0] * 6).metrics
    configured({"loss.beta": 1e-9})
    in_the_loss = engine.step(state, examples, [0] * 6).metrics
    assert measured["kl"] == pytest.approx(in_the_loss["kl"], rel=1e-4)
    assert measured["kl"] > 1e-6
    assert (measured["tokens_checked"], in_the_loss["tokens_checked"]) == (measured["tokens_forward"], 0)


def test_a_nan_of_the_trainer_fails_the_comparison_with_the_sampler(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every NaN counted as a logprob that the sampler had not recorded."""
    first, state = after(engine, 1)
    examples = sampled(engine, first, 0, 6, 0)
    unknown = examples[0].sequence.logprobs.copy()
    unknown[-1] = np.nan  # the sampler recorded no logprob of this token: it is not compared
    examples[0] = Example(dataclasses.replace(examples[0].sequence, logprobs=unknown), 1.0)
    step = checks.Step(state, examples, [0] * 6, [], "padded", 100.0)
    metrics = checks.compare_earlier_versions(engine.passes, step, 1.0)
    assert metrics["sampler_logprob_diff_max"] < 1e-5
    assert metrics["sampler_logprob_checked"] == 6 * 5 - 1
    compute = PolicyModel.logprobs

    def broken(self: PolicyModel, *args: Any, **kwargs: Any) -> Any:
        logprobs, *rest = compute(self, *args, **kwargs)
        logprobs[0, 0] = torch.nan
        return logprobs, *rest

    monkeypatch.setattr(PolicyModel, "logprobs", broken)
    metrics = checks.compare_earlier_versions(engine.passes, step, 1.0)
    assert np.isnan(metrics["sampler_logprob_diff"])
    assert np.isnan(metrics["sampler_logprob_diff_max"])
    with pytest.raises(SamplerMismatchError, match="differ by nan nats"):
        engine._check_sampler_agrees(metrics, 0)


def test_one_token_does_not_make_the_divergence() -> None:
    """In a run of the demo a token that the base finds 13,000 times as probable made 1.4 nats 40.9."""
    rng = np.random.default_rng(0)
    near = rng.normal(0.0, 0.02, 400)
    assert checks.kl_of(near) == pytest.approx(float((np.exp(near) - near - 1).mean()))
    far = np.append(rng.normal(-1.4, 0.5, 318), 9.5)
    assert 0.5 < checks.kl_of(far) < 1.5
