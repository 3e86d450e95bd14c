"""The engines' settings. Unsloth itself needs a GPU: here a stand-in records what it is asked for."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from pipeline.config import (
    Config,
    ConfigError,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    TrainerConfig,
    UnslothConfig,
    VllmConfig,
)
from tests.trainer.families import make
from tests.trainer.kit import backward, exactly, make_model, sequence, stir, tree_of_conversations
from trainer.batches.examples import Example
from trainer.batches.packing import MicroBatch
from trainer.engine import loading
from trainer.engine import model as engines
from trainer.engine.engine import Engine
from trainer.engine.state import UntrainableError

CPU = torch.device("cpu")


def test_attention_makes_no_plan_for_each_length(tiny_base: str) -> None:
    """cuDNN's attention does, in tens of milliseconds, and PyTorch prefers it on an H100."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    Engine(tiny_base, TrainerConfig())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "unsloth"},
        {"engine": "unsloth", "memory": MemoryConfig(quantization="fp8")},
        {"memory": MemoryConfig(quantization="4bit", sharded=True)},
    ],
)
def test_settings_that_this_machine_can_not_run_are_errors(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError):
        loading.device_for(TrainerConfig(**settings))


@pytest.mark.parametrize("damage", ["cut off", "a tensor less"])
def test_a_model_whose_weights_are_damaged_is_refused(tiny_base: str, tmp_path: Path, damage: str) -> None:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    (file,) = base.glob("*.safetensors")
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
        why = "can't be trained: "
    else:
        tensors = load_file(file)
        lost = next(name for name in tensors if "q_proj" in name)
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, {"format": "pt"})
        why = f"can't be trained: its weights lack 1 of the model's tensors: {lost}"
    with pytest.raises(ConfigError, match=why):
        loading.load(str(base), TrainerConfig(), CPU)


def test_unsloth_never_shares_prefixes() -> None:
    with pytest.raises(ConfigError, match="attention mask"):
        loading.load("base", TrainerConfig(engine="unsloth", memory=MemoryConfig(packing="prefix")), CPU)


class FastLanguageModel:
    """Stands in for Unsloth's entry point."""

    asked: dict[str, Any] = {}  # noqa: RUF012 - a recording

    @classmethod
    def from_pretrained(cls, **asked: Any) -> tuple[Any, None]:
        cls.asked = asked
        return AutoModelForCausalLM.from_pretrained(asked["model_name"], dtype=asked["dtype"]), None

    @classmethod
    def get_peft_model(cls, model: Any, **asked: Any) -> Any:
        cls.asked |= asked
        wanted = {k: asked[k] for k in ("r", "lora_alpha", "lora_dropout", "bias", "target_modules")}
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **wanted))


def test_unsloth_gets_the_settings_and_padded_batches(tiny_base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=FastLanguageModel))
    monkeypatch.setattr(engines, "device_for", lambda _: CPU)
    config = TrainerConfig(
        engine="unsloth",
        seed=9,
        dtype="float32",
        logprob_bound=1e9,
        memory=MemoryConfig(quantization="4bit"),
        lora=LoraConfig(rank=4),
    )
    engine = Engine(tiny_base, config)
    asked = FastLanguageModel.asked
    assert (asked["load_in_4bit"], asked["r"], asked["random_state"]) == (True, 4, 9)
    assert asked["use_exact_model_name"]  # a copy of Unsloth's own is not the model that is served
    seen: list[MicroBatch] = []
    original = engine.passes._backward

    def watch(batch: MicroBatch, *args: Any) -> None:
        seen.append(batch)
        original(batch, *args)

    monkeypatch.setattr(engine.passes, "_backward", watch)
    sequences, groups = tree_of_conversations()
    engine.step(engine.initial_state(), [Example(s, 1.0) for s in sequences], groups)
    assert all(b.layout.ends_RL is None for b in seen)


def test_what_unsloth_refuses_is_an_error_of_the_settings_and_a_full_gpu_is_not(
    tiny_base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(FastLanguageModel):
        error: Exception

        @classmethod
        def from_pretrained(cls, **asked: Any) -> tuple[Any, None]:
            raise cls.error

    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=Refusing))
    config = TrainerConfig(engine="unsloth", dtype="float32")
    for error in (RuntimeError("Unsloth: both failed. More"), NotImplementedError("Unsloth: not this")):
        Refusing.error = error
        with pytest.raises(ConfigError, match=r"can't be trained: Unsloth: (both failed|not this)$"):
            loading.load(tiny_base, config, CPU)
    full = torch.OutOfMemoryError("CUDA out of memory")
    Refusing.error = full
    with pytest.raises(torch.OutOfMemoryError) as passed:  # memory may be free at the next start
        loading.load(tiny_base, config, CPU)
    assert passed.value is full


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    stir(engine)
    sequences, groups = tree_of_conversations()
    advantages = torch.linspace(-1.0, 1.5, len(sequences)).tolist()
    engine.model.peft.zero_grad(set_to_none=True)
    backward(engine, [Example(s, a) for s, a in zip(sequences, advantages, strict=True)], groups, 0)
    return {n: p.grad.clone() for n, p in engine.model.peft.named_parameters() if p.grad is not None}


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
        engine = exactly(Engine(base, config))
        assert engine.model.checkpointing is (setting == "on")
        found.append(gradients(engine))
    off, on = found
    assert off.keys() == on.keys()
    assert any(float(g.abs().max()) > 0 for g in off.values())
    for name, gradient in off.items():
        share = 1e-9 if exact else 1e-4
        torch.testing.assert_close(on[name], gradient, rtol=share, atol=share * float(gradient.abs().max()))


def test_a_model_that_can_not_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    base = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="gradient_checkpointing: Qwen3ForCausalLM"):
        Engine(base, TrainerConfig(memory=MemoryConfig(gradient_checkpointing="on")))
    monkeypatch.setattr(loading, "wants_checkpointing", lambda *_: True)
    assert not Engine(base, TrainerConfig(lora=LoraConfig(rank=4))).model.checkpointing


@pytest.mark.parametrize(("served", "setting", "longest"), [(0, 0, 512), (17, 0, 17), (17, 18, 18), (0, 9999, 512)])
def test_unsloth_prepares_for_the_served_length_and_longer_sequences_are_dropped(
    tiny_base: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    served: int,
    setting: int,
    longest: int,
) -> None:
    """Unsloth cuts longer rows off, and scales the positions of a model beyond its own limit."""
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=FastLanguageModel))
    monkeypatch.setattr(engines, "device_for", lambda _: CPU)
    model = ModelConfig(base=tiny_base)
    config = Config(
        models=(model,),
        vllm=VllmConfig(max_model_len=served),
        trainer=TrainerConfig(
            engine="unsloth", dtype="float32", logprob_bound=1e9, unsloth=UnslothConfig(max_seq_length=setting)
        ),
    )
    engine = Engine(tiny_base, config.trainer_of(model))
    assert FastLanguageModel.asked["max_seq_length"] == longest
    assert ("the model's own limit" in caplog.text) == (setting > longest)
    short, long = (sequence([5] * n, [n - 1]) for n in (longest, longest + 1))
    result = engine.step(engine.initial_state(), [Example(short, 1.0), Example(long, -1.0)], [0, 0])
    assert result.dropped == (long,)
    with pytest.raises(UntrainableError, match="fits in memory on its own, or into the model's length"):
        engine.step(engine.initial_state(), [Example(long, 1.0)], [0])


def test_the_peak_of_a_gpu_is_found_by_its_name() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4", "NVIDIA L40S", "Someone's GPU")
    assert [loading.peak_tflop_per_s(name) for name in names] == [989.0, 756.0, 121.0, 362.0, None]
