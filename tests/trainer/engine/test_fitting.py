"""Steps where memory does not hold what the budget allows. A stand-in for the passes says when memory runs out."""

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from pipeline.config import LoraConfig, MemoryConfig, TrainerConfig
from tests.kits.settings import with_values
from tests.trainer.engine.kit import batch
from tests.trainer.kit import VOCAB, exactly, sequence
from trainer.batches.examples import Example
from trainer.batches.packing import Layout
from trainer.engine import checks
from trainer.engine.engine import Engine
from trainer.engine.fitting import PassTooLargeError, is_out_of_memory
from trainer.engine.model import PolicyModel
from trainer.engine.state import UntrainableError


def engine_with(tiny_base: str, **memory: Any) -> Engine:
    memory_config = MemoryConfig(tokens_per_batch=1024, packing="padded", **memory)
    config = TrainerConfig(dtype="float64", logprob_bound=1e9, lora=LoraConfig(rank=4), memory=memory_config)
    return exactly(Engine(tiny_base, config))


@pytest.fixture
def engine(tiny_base: str) -> Engine:
    return engine_with(tiny_base, gradient_checkpointing="off")


def fail(monkeypatch: pytest.MonkeyPatch, condition: Callable[[PolicyModel, int], bool]) -> list[int]:
    """From now on a pass runs out of memory where this is true of the model and the pass's tokens. Returns the sizes of
    the passes that were tried."""
    original, tried = PolicyModel.logprobs, []

    def limited(self: PolicyModel, layout: Layout, *args: Any, **kwargs: Any) -> Any:
        tried.append(layout.ids_RL.numel())
        if condition(self, tried[-1]):
            raise torch.OutOfMemoryError  # without a message: its first line was an IndexError
        return original(self, layout, *args, **kwargs)

    monkeypatch.setattr(PolicyModel, "logprobs", limited)
    return tried


def test_out_of_memory_switches_checkpointing_on_before_passes_become_smaller(
    tiny_base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(tiny_base)
    state = engine.initial_state()
    examples = batch(engine, state)
    whole = engine.step(state, examples, [0] * 6)
    assert not engine.model.checkpointing
    fail(monkeypatch, lambda model, _: not model.checkpointing)
    again = engine.step(state, examples, [0] * 6)
    assert engine.model.checkpointing
    assert again.metrics["token_budget"] == whole.metrics["token_budget"] == 1024
    assert again.metrics["micro_batches"] == whole.metrics["micro_batches"]
    for name, tensor in whole.state.weights.items():
        torch.testing.assert_close(again.state.weights[name], tensor, rtol=1e-9, atol=1e-12)


def test_out_of_memory_halves_the_budget_and_the_step_is_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    state = engine.initial_state()
    examples = batch(engine, state)
    whole = engine.step(state, examples, [0] * 6)
    fail(monkeypatch, lambda _, tokens: tokens > 60)
    engine.configure(msgspec.structs.replace(engine.config, check_share=0.0))
    halved = engine.step(state, examples, [0] * 6)
    assert halved.metrics["token_budget"] <= 64
    assert halved.metrics["micro_batches"] > 1
    assert halved.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-9)
    for name, tensor in whole.state.weights.items():
        torch.testing.assert_close(halved.state.weights[name], tensor, rtol=1e-7, atol=1e-9)
    for limit, budget in ((2000, halved.metrics["token_budget"]), (30, 30)):  # a changed limit raises no reduced budget
        engine.configure(with_values(engine.config, {"memory.tokens_per_batch": limit}))
        assert engine.passes.budget.tokens == budget
    monkeypatch.setattr(engine.model, "logprobs", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step(state, examples, [0] * 6)


@pytest.mark.parametrize("packing", ["padded", "prefix"])
def test_a_sequence_that_does_not_fit_alone_is_left_out_and_the_rest_is_trained(
    engine: Engine, packing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the budget fell to 64 for good, the trainer restarted ten times and the batch was buried."""
    engine.configure(with_values(engine.config, {"memory.packing": packing}))
    state = engine.initial_state()
    examples = batch(engine, state)
    without = engine.step(state, examples, [0] * 6)
    assert without.dropped == ()
    assert without.metrics["sequences_dropped"] == 0
    tried = fail(monkeypatch, lambda _, tokens: tokens > 150)
    long = Example(sequence([2 + i % (VOCAB - 2) for i in range(203)], [200, 201, 202]), 0.7)
    result = engine.step(state, [*examples[:3], long, *examples[3:]], [0] * 7)
    assert result.dropped == (long.sequence,)
    assert (result.metrics["sequences_dropped"], result.metrics["tokens_dropped"]) == (1, 3)
    assert result.metrics["sequences"] == 6
    assert tried.count(202) == 2  # it gets a second try alone, with all memory free
    for name, tensor in without.state.weights.items():
        torch.testing.assert_close(result.state.weights[name], tensor, rtol=1e-7, atol=1e-9)
    # The sequence was at fault: passes are as large as before.
    assert engine.passes.budget.tokens == 1024
    assert "it does not fit in memory even alone" in caplog.text


def test_a_batch_of_which_no_sequence_fits_is_untrainable(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    state = engine.initial_state()
    examples = batch(engine, state)
    fail(monkeypatch, lambda _, tokens: tokens > 5)
    with pytest.raises(UntrainableError, match="step 1 skipped: none of its 6 sequences fits in memory on its own"):
        engine.step(state, examples, [0] * 6)


def test_a_check_that_does_not_fit_is_skipped_and_reported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = engine.initial_state()
    examples = batch(engine, state)
    fail(monkeypatch, lambda *_: not torch.is_grad_enabled())
    monkeypatch.setattr(checks, "EVERY", 1)
    engine.configure(msgspec.structs.replace(engine.config, check_share=1.0))
    metrics = engine.step(state, examples, [0] * 6).metrics
    assert metrics["checks_left_out"] == 1
    assert "sampler_logprob_diff" not in metrics
    assert "a check of the step is skipped" in caplog.text


def test_out_of_memory_errors_are_recognised_and_can_be_pickled() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(RuntimeError("a bug"))
    error = pickle.loads(pickle.dumps(PassTooLargeError((3,), 70, "no room")))
    assert is_out_of_memory(error)
    assert (error.indices, error.tokens, error.only_index) == ((3,), 70, 3)
    assert str(error) == "out of memory in a pass of 1 sequence(s) and 70 tokens: no room"
    assert PassTooLargeError((3, 4), 70, "").only_index is None
