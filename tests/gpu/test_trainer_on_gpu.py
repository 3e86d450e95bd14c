"""The trainer on CUDA: its kernels, types, layouts and memory, on tiny random models.

Where there is no GPU they run on the CPU, which proves nothing of GPUs but that the tests still fit the code."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from pipeline.config import TrainerConfig
from tests.kits.settings import with_values
from tests.trainer import families
from tests.trainer.kit import backward
from trainer.batches.examples import Example
from trainer.engine import model as model_module
from trainer.engine.engine import Engine
from trainer.engine.verify import logprob_bound_for
from trainer.sequences import TokenSequence

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tmp_path: Path) -> MakeEngine:
    """An engine over a tiny model of a family; keyword arguments are the trainer's settings. It is verified as users'
    are, and later holds no step to the recorded logprobs, which are made up."""

    def make(family: str = "qwen3", **settings: object) -> Engine:
        folder = tmp_path / family
        base = str(folder) if folder.exists() else families.make(family, folder)
        config = with_values(TrainerConfig(), {"optimizer.learning_rate": 1e-2, **settings})
        engine = Engine(base, config)
        engine.configure(msgspec.structs.replace(config, logprob_bound=math.inf))
        return engine

    return make


def batch(groups: int = 2, members: int = 4, shared: int = 24, own: int = 16) -> tuple[list[Example], list[int]]:
    """Groups with a common beginning; the recorded logprobs are of a uniform sampler, off the model's own."""
    rng = np.random.default_rng(0)
    examples, group_of = [], []
    for group in range(groups):
        prompt = rng.integers(2, families.VOCAB, shared)
        for _ in range(members):
            ids = np.concatenate([prompt, rng.integers(2, families.VOCAB, own)]).astype(np.int32)
            trained = np.arange(len(ids)) >= shared
            logprobs = np.where(trained, -math.log(families.VOCAB), np.nan).astype(np.float32)
            sequence = TokenSequence(
                "t", ids, trained, logprobs, np.where(trained, 0, -1).astype(np.int32), np.ones(len(ids), np.float32)
            )
            examples.append(Example(sequence, float(rng.normal())))
            group_of.append(group)
    return examples, group_of


def gradient(engine: Engine) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the batch, the adapter's B matrices not being zero."""
    generator = torch.Generator().manual_seed(0)
    weights = {k: torch.randn(w.shape, generator=generator) * 0.05 for k, w in engine.model.weights().items()}
    engine.model.load_adapter(weights)
    engine.model.peft.zero_grad(set_to_none=True)
    metrics = backward(engine, *batch(), 0)
    flat = torch.cat([p.grad.flatten().double().cpu() for p in engine.model.parameters if p.grad is not None])
    return metrics["loss"], flat


def assert_learns(engine: Engine) -> None:
    """Eight steps on one batch lower its loss."""
    examples, groups = batch()
    state, losses = engine.initial_state(), []
    for _ in range(8):
        result = engine.step(state, examples, groups)
        state = result.state
        losses.append(result.metrics["loss"])
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(w).all() for w in state.weights.values())


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_loss_and_gradient_are_those_of_the_cpu(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    on_gpu = gradient(make_engine(dtype="float32", **{"memory.packing": packing}))
    monkeypatch.setattr(model_module, "device_for", lambda _: torch.device("cpu"))
    on_cpu = gradient(make_engine(dtype="float32", **{"memory.packing": packing}))
    # Float32 sums of the same terms in another order: relative to the gradient's own size.
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-4, abs=1e-5)
    assert float((on_gpu[1] - on_cpu[1]).norm() / on_cpu[1].norm()) < 1e-3


def test_shared_prefixes_give_what_padded_rows_give(make_engine: MakeEngine) -> None:
    shared = gradient(make_engine(dtype="float32", **{"memory.packing": "prefix"}))
    padded = gradient(make_engine(dtype="float32", **{"memory.packing": "padded"}))
    assert shared[0] == pytest.approx(padded[0], rel=1e-4, abs=1e-5)
    assert float((shared[1] - padded[1]).norm() / padded[1].norm()) < 1e-3


FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "granite",
    "cohere",
    "phi3",
    "gpt_oss",
    "qwen3_moe",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_compute_what_their_own_forward_pass_computes(
    make_engine: MakeEngine, family: str, dtype: str
) -> None:
    engine = make_engine(family, dtype=dtype)
    bound = logprob_bound_for(TrainerConfig(), engine.model.dtype)
    for found in (engine.passes.verified.padded, engine.passes.verified.prefix_shared):
        assert found is not None
        assert (found.largest if dtype == "float32" else found.mean) <= bound, str(found)


def test_a_gpu_trains_in_bfloat16_by_default(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert engine.model.dtype == expected
    assert {p.device.type for p in engine.model.parameters} == {engine.model.device.type}


def test_steps_lower_the_loss(make_engine: MakeEngine) -> None:
    engine = make_engine(**{"loss.importance_sampling": "none", "loss.epsilon": 10.0})
    assert_learns(engine)


def test_a_line_goes_on_from_its_state_as_if_it_had_never_stopped(make_engine: MakeEngine) -> None:
    examples, groups = batch()
    first = make_engine(dtype="float32")
    state = first.step(first.initial_state(), examples, groups).state
    went_on = first.step(state, examples, groups).state
    second = make_engine(dtype="float32")
    resumed = second.step(dataclasses.replace(state), examples, groups).state
    for name, weight in went_on.weights.items():
        # Adam divides by the root of a moment: what differs by rounding moves by a small part of a learning rate.
        torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-3, atol=1e-3)


def test_out_of_memory_halves_the_budget_and_the_step_is_taken(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**{"memory.packing": "padded", "memory.tokens_per_batch": 512})
    forward, refused = engine.model.logprobs, []

    def small(layout, shape, **options):  # type: ignore[no-untyped-def]
        if layout.ids_RL.numel() > 200:
            refused.append(layout.ids_RL.numel())
            if torch.cuda.is_available():
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")  # a petabyte: PyTorch's own error
            raise torch.OutOfMemoryError("not enough memory")
        return forward(layout, shape, **options)

    monkeypatch.setattr(engine.model, "logprobs", small)
    result = engine.step(engine.initial_state(), *batch())
    assert refused
    assert result.metrics["token_budget"] < 512
    assert result.state.step == 1


def test_gradient_checkpointing_is_on_by_default_and_changes_no_gradient(make_engine: MakeEngine) -> None:
    engine = make_engine(dtype="float32", **{"memory.packing": "padded"})
    assert engine.model.checkpointing == torch.cuda.is_available()
    on = gradient(make_engine(dtype="float32", **{"memory.packing": "padded", "memory.gradient_checkpointing": "on"}))
    off = gradient(make_engine(dtype="float32", **{"memory.packing": "padded", "memory.gradient_checkpointing": "off"}))
    assert on[0] == pytest.approx(off[0], rel=1e-4, abs=1e-5)
    assert float((on[1] - off[1]).norm() / off[1].norm()) < 1e-3


def test_the_trainer_takes_its_share_of_the_memory(make_engine: MakeEngine) -> None:
    if not torch.cuda.is_available():
        pytest.skip("on CPU no share of the memory can be set")
    try:
        make_engine(**{"memory.gpu_share": 0.25})
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(("kind", "package"), [("fp8", "torchao"), ("4bit", "bitsandbytes")])
def test_a_quantised_base_model_takes_less_memory_and_learns(make_engine: MakeEngine, kind: str, package: str) -> None:
    pytest.importorskip(package)

    def bytes_of(engine: Engine) -> int:
        frozen = [p for p in engine.model.peft.parameters() if not p.requires_grad]
        return sum(getattr(p, "qdata", p).nbytes for p in frozen)  # torchao's tensors tell the size of the whole ones

    settings = {"loss.importance_sampling": "none", "loss.epsilon": 10.0}
    engine = make_engine(**settings, **{"memory.quantization": kind})
    assert bytes_of(engine) < bytes_of(make_engine(**settings))
    assert_learns(engine)


def test_a_base_model_that_left_the_gpu_and_came_back_is_the_same(make_engine: MakeEngine) -> None:
    """As between two turns of `vllm.sleep`."""
    engine = make_engine(dtype="float32")
    before, model = gradient(engine), engine.model
    bytes_of = sum(p.nbytes for p in model.peft.parameters() if not p.requires_grad)
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    model.move_base(torch.device("cpu"))
    if torch.cuda.is_available():
        assert held - torch.cuda.memory_allocated() >= bytes_of
    assert {p.device for p in model.parameters} == {model.device}
    model.move_base(model.device)
    after = gradient(engine)
    assert after[0] == pytest.approx(before[0], rel=1e-4, abs=1e-5)
    assert float((after[1] - before[1]).norm() / before[1].norm()) < 1e-3


def test_a_step_with_checks_agrees_with_its_own_records(make_engine: MakeEngine) -> None:
    """What the trainer computes twice, one sequence at a time and in the step, is the same."""
    engine = make_engine(dtype="bfloat16", **{"memory.packing": "padded"})
    examples, groups = batch()
    from benchmarks.gpu import own_logprobs

    recorded = own_logprobs(engine, examples)
    engine.configure(msgspec.structs.replace(engine.config, logprob_bound=None))
    metrics = engine.step(engine.initial_state(), recorded, groups).metrics
    assert metrics["on_policy_logprob_diff"] <= logprob_bound_for(TrainerConfig(), engine.model.dtype)
