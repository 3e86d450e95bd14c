"""Loads a base model and adds a fresh adapter, with either engine.

`transformers` serves CPU and CUDA. `unsloth` (CUDA only) patches the model's code: it is faster and can hold the base
in four bits, but it replaces the attention mask by a plain causal one, so prefixes are never shared on that path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from pipeline.config import ConfigError, TrainerConfig
from pipeline.telemetry.logs import get_logger
from trainer.engine.attention import attention_implementation
from trainer.engine.forward import disable_randomness

log = get_logger("trainer.engine.loading")

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the architectures that Unsloth patches."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A base model with a fresh adapter."""

    model: Any
    lora: LoraConfig
    accepts_masks: bool
    """Whether the model applies the attention mask that it is given, which shared prefixes need."""
    checkpointing: bool = False
    """Whether layers compute their activations again for the backward pass."""


def device_for(config: TrainerConfig) -> torch.device:
    """The device that the engine runs on. Raises `ConfigError` if the engine can't run on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.engine == "unsloth" and device.type != "cuda":
        raise ConfigError("trainer.engine: unsloth needs a CUDA GPU; `transformers` runs everywhere")
    if config.unsloth.load_in_4bit and config.engine != "unsloth":
        raise ConfigError("trainer.unsloth.load_in_4bit: only engine `unsloth` loads in four bits")
    return device


def dtype_for(config: TrainerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load(base: str, config: TrainerConfig, device: torch.device) -> LoadedModel:
    """`base` (a folder or hub name) with an adapter whose first weights depend on `config.seed` alone."""
    if config.engine == "unsloth":
        if config.memory.packing == "prefix":
            raise ConfigError(
                "trainer.memory.packing: unsloth replaces the attention mask, so prefixes can't be shared; use "
                "`padded` or `auto`"
            )
        return _load_unsloth(base, config, device)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype_for(config, device), attn_implementation=attention_implementation(config, device)
    )
    lora = LoraConfig(
        r=config.lora.rank, lora_alpha=config.lora.alpha, lora_dropout=0.0, bias="none",
        target_modules=find_lora_targets(model, config), task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.seed)
    peft = get_peft_model(model, lora).to(device)
    disable_randomness(peft)
    return LoadedModel(peft, lora, accepts_masks=True, checkpointing=_checkpoint(model, config, device))


def wants_checkpointing(config: TrainerConfig, device: torch.device) -> bool:
    """Whether activations are to be computed again for the backward pass, by the setting and the device."""
    if config.memory.gradient_checkpointing == "auto":
        return bool(device.type == "cuda")
    return bool(config.memory.gradient_checkpointing == "on")


def _checkpoint(model: Any, config: TrainerConfig, device: torch.device) -> bool:
    """Switch gradient checkpointing on where it is wanted; whether it is on. Raises `ConfigError` where the setting
    is `on` and the model can't."""
    if not wants_checkpointing(config, device):
        return False
    try:
        # Nothing in the model is random (see `disable_randomness`), so no random state has to be kept.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except (ValueError, NotImplementedError) as error:
        if config.memory.gradient_checkpointing == "on":
            raise ConfigError(
                f"trainer.memory.gradient_checkpointing: {type(model).__name__}: {error}"
            ) from error
        log.warning("this model has no gradient checkpointing: passes take more memory", error=str(error))
        return False
    return True


def find_lora_targets(model: Any, config: TrainerConfig) -> list[str]:
    """The linear layers that get an adapter, by the ends of their names: those of `trainer.lora.targets`, or all that
    can.

    Raises `ConfigError` where a name of the setting is none of them. Routers and experts get none: PEFT would put
    adapters on the experts' fused weights and on the router, which vLLM does not serve."""
    head = model.get_output_embeddings()
    linear = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head
    }
    # A class of a model's own answers more than a product: Llama4's router gives scores and logits.
    left_out = {_leaf(name) for name, m in linear.items()
                if type(m) is not Conv1D and type(m).__module__.startswith("transformers.models.")}  # fmt: skip
    if model.config.model_type in ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"):
        left_out |= {"out_proj", "conv1d"}  # their fused kernels read the weights past PEFT
    if any("experts" in name and p.dim() == 3 for name, p in model.named_parameters()):
        left_out |= {
            "gate",
            "router",
            "shared_expert_gate",
            "gate_proj",
            "up_proj",
            "down_proj",
            "w1",
            "w2",
            "w3",
        }
    possible = {_leaf(name) for name in linear} - left_out
    if unknown := set(config.lora.targets) - possible:
        raise ConfigError(
            f"trainer.lora.targets: {', '.join(sorted(unknown))} can't have an adapter; there are: "
            f"{', '.join(sorted(possible))}"
        )
    return sorted(config.lora.targets or possible)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _load_unsloth(base: str, config: TrainerConfig, device: torch.device) -> LoadedModel:
    # Imported here only: it patches transformers and PEFT for the whole process as it is imported.
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=base,
        max_seq_length=config.unsloth.max_seq_length,
        load_in_4bit=config.unsloth.load_in_4bit,
        dtype=dtype_for(config, device),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(config.lora.targets or TARGETS),
        use_gradient_checkpointing="unsloth" if wants_checkpointing(config, device) else False,
        random_state=config.seed,
    )
    disable_randomness(model)
    return LoadedModel(model, model.peft_config["default"], False, wants_checkpointing(config, device))
