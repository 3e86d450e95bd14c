"""The memory formula, also with gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config import ConfigError, LoraConfig, MemoryConfig, TrainerConfig
from tests.trainer.families import make
from tests.trainer.kit import backward, exactly, make_model, stir, tree_of_conversations
from trainer.batches.groups import Example
from trainer.engine import loading, memory
from trainer.engine.engine import Engine
from trainer.engine.memory import Memory


def test_the_memory_per_token_is_what_autograd_saves(tmp_path: Path) -> None:
    """A longer pass costs in proportion."""
    one = Engine(
        make_model(tmp_path / "one"),
        TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(packing="padded")),
        tmp_path,
    )
    kept = [memory._saved_bytes(one, n) for n in (32, 64, 128)]
    assert 2 * (kept[1] - kept[0]) == kept[2] - kept[1]
    found = one.memory()
    assert found.per_token == (kept[1] - kept[0]) // 32
    assert found.weights == sum(p.numel() * 4 for p in one.model.parameters()) + sum(
        b.numel() * b.element_size() for b in one.model.buffers()
    )
    assert found.optimizer == 12 * sum(p.numel() for p in one.parameters)
    more = found.step(2000) - found.step(1000)
    assert more == pytest.approx(1100 * found.per_token, rel=1e-3)
    fits = found.tokens()
    assert fits is not None
    assert fits > 1000


def per_layer(folder: Path, eighths: int, **memory_settings: Any) -> int:
    """Bytes that a layer of Qwen3-8B's shape, with so many eighths of its width, keeps for each token."""
    found = []
    for layers in (1, 2):
        shape = Qwen3Config(
            vocab_size=64, hidden_size=512 * eighths, intermediate_size=1536 * eighths, num_hidden_layers=layers,
            num_attention_heads=4 * eighths, num_key_value_heads=eighths, head_dim=128, max_position_embeddings=512,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        )  # fmt: skip
        Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
        config = TrainerConfig(
            dtype="bfloat16",
            logprob_bound=1.0,
            lora=LoraConfig(rank=16),
            memory=MemoryConfig(**memory_settings),
        )
        found.append(memory._per_token(Engine(str(folder), config, folder)))
    return found[1] - found[0]


@pytest.mark.parametrize(("checkpointing", "expected"), [("off", 295_656), ("on", 4096 * 2)])
def test_a_layer_of_qwen3_8b_saves_the_measured_number_of_bytes(
    tmp_path: Path, checkpointing: str, expected: int
) -> None:
    """All that is kept is proportional to a width or to the rank, so two widths give the third. The figure without
    checkpointing was measured outside of the project; with it, a layer keeps its input."""
    one, two = (per_layer(tmp_path, n, gradient_checkpointing=checkpointing) for n in (1, 2))
    assert one + 7 * (two - one) == expected


def test_with_checkpointing_a_token_costs_its_inputs_and_one_layer(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    off = Engine(
        folder, TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(packing="padded")), tmp_path
    )
    on = Engine(
        folder,
        TrainerConfig(
            lora=LoraConfig(rank=4), memory=MemoryConfig(packing="padded", gradient_checkpointing="on")
        ),
        tmp_path,
    )
    everything, inputs = memory._per_token(off), memory._per_token(on)
    assert inputs < everything / 4
    assert off.memory().per_token == everything
    # Of two layers; under checkpointing the embeddings' output has a gradient too, so the first layer's norm keeps
    # its input.
    width = 32 * 4
    assert everything // 2 <= on.memory().per_token - inputs <= everything // 2 + width
    assert memory._per_token(on) == inputs  # switched on again


def test_the_masks_of_a_tree_grow_with_its_square() -> None:
    plain = Memory(weights=0, optimizer=0, per_token=1000, logits=0, per_pair=0, free=11_000_000)
    assert plain.tokens(1.0) == 10_000
    masks = Memory(weights=0, optimizer=0, per_token=1000, logits=0, per_pair=3, free=11_000_000)
    fits = masks.tokens(1.0)
    assert fits is not None
    assert masks.step(fits) <= 11_000_000 < masks.step(fits + 2)
    assert Memory(weights=0, optimizer=9, per_token=1, logits=0, per_pair=0, free=5).tokens() == 0


def test_free_memory_is_limited_to_the_trainers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for name, value in (("mem_get_info", (50, 100)), ("memory_reserved", 30), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert memory.free_bytes(device) == 60
    assert memory.free_bytes(device, 0.45) == 25  # the inference server may not have taken its share yet
    assert memory.free_bytes(device, 0.9) == 60
    assert memory.free_bytes(device, 0.1) == 0


def test_on_cuda_the_token_budget_is_limited_by_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU here: what is said of the device and of the memory is made up."""
    engine = Engine(
        make_model(tmp_path / "model"),
        TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(tokens_per_batch=9000)),
        tmp_path,
    )
    made_up = Memory(weights=0, optimizer=0, per_token=1000, logits=0, per_pair=0, free=5_500_000)
    monkeypatch.setattr("trainer.engine.engine.estimate", lambda *_, **__: made_up)
    assert engine.plan_passes() is made_up
    assert engine.budget.tokens == 9000  # on the CPU it is only said
    engine.device = torch.device("cuda")
    engine.plan_passes()
    assert engine.budget.tokens == made_up.tokens() == 4500
    engine.configure(TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(tokens_per_batch=20_000)))
    assert engine.budget.tokens == 4500
    engine.configure(TrainerConfig(lora=LoraConfig(rank=4), memory=MemoryConfig(tokens_per_batch=100)))
    assert engine.budget.tokens == 100


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    stir(engine)
    sequences, groups = tree_of_conversations()
    advantages = torch.linspace(-1.0, 1.5, len(sequences)).tolist()
    engine.model.zero_grad(set_to_none=True)
    backward(engine, [Example(s, a) for s, a in zip(sequences, advantages, strict=True)], groups, 0)
    return {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["padded", "prefix"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_checkpointing_gives_the_same_gradients(tmp_path: Path, family: str, packing: str) -> None:
    base = make(family, tmp_path)
    exact = family != "qwen3_moe"  # PyTorch's grouped products have no float64
    found = []
    for setting in ("off", "on"):
        config = TrainerConfig(
            dtype="float64" if exact else "float32",
            logprob_bound=1e-3,
            lora=LoraConfig(rank=4),
            memory=MemoryConfig(packing=packing, gradient_checkpointing=setting),
        )  # type: ignore[arg-type]
        engine = exactly(Engine(base, config, tmp_path))
        assert engine.checkpointing is (setting == "on")
        found.append(gradients(engine))
    off, on = found
    assert off.keys() == on.keys()
    assert any(float(g.abs().max()) > 0 for g in off.values())
    for name, gradient in off.items():
        share = 1e-9 if exact else 1e-4
        torch.testing.assert_close(on[name], gradient, rtol=share, atol=share * float(gradient.abs().max()))


def test_checkpointing_is_on_by_default_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = loading.wants_checkpointing
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [wanted(TrainerConfig(), d) for d in (cpu, gpu)] == [False, True]
    assert [
        wanted(TrainerConfig(memory=MemoryConfig(gradient_checkpointing="on")), d) for d in (cpu, gpu)
    ] == [True, True]
    assert [
        wanted(TrainerConfig(memory=MemoryConfig(gradient_checkpointing="off")), d) for d in (cpu, gpu)
    ] == [False, False]


def test_a_model_that_can_not_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    base = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="gradient_checkpointing: Qwen3ForCausalLM"):
        Engine(base, TrainerConfig(memory=MemoryConfig(gradient_checkpointing="on")), tmp_path)
    monkeypatch.setattr(loading, "wants_checkpointing", lambda *_: True)
    assert not Engine(base, TrainerConfig(lora=LoraConfig(rank=4)), tmp_path).checkpointing
