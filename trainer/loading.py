"""Loading a base model and putting a fresh adapter on it: the two engines.

`transformers` serves CPU and CUDA. `unsloth` (CUDA only) patches the model's code: it is faster and can hold the base
in four bits, but it replaces the attention mask by a plain causal one, so prefixes are never shared on that path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from pipeline.config import ConfigError, TrainerConfig
from trainer.attention import implementation

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of the architectures that Unsloth patches; elsewhere PEFT finds all linear layers itself."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A base model with a fresh adapter."""

    model: Any
    lora: LoraConfig
    prefix_sharing: bool
    """Whether the model obeys an attention mask of ours."""


def device_for(config: TrainerConfig) -> torch.device:
    """Raises `ConfigError` where the engine can't run on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.engine == "unsloth" and device.type != "cuda":
        raise ConfigError("trainer.engine: unsloth needs a CUDA GPU; `transformers` runs everywhere")
    if config.load_in_4bit and config.engine != "unsloth":
        raise ConfigError("trainer.load_in_4bit: only engine `unsloth` loads in four bits")
    return device


def dtype_for(config: TrainerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load(base: str, config: TrainerConfig, device: torch.device) -> Loaded:
    """`base` (a folder or hub name) with an adapter whose first weights depend on `config.seed` alone."""
    if config.engine == "unsloth":
        if config.packing == "prefix":
            raise ConfigError(
                "trainer.packing: unsloth replaces the attention mask, so prefixes can't be shared; use `padded` or `auto`"
            )
        return _load_unsloth(base, config, device)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype_for(config, device), attn_implementation=implementation(config, device)
    )
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, bias="none",
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(config.seed)
    return Loaded(get_peft_model(model, lora).to(device), lora, prefix_sharing=True)


def _load_unsloth(base: str, config: TrainerConfig, device: torch.device) -> Loaded:
    # Imported here only: it patches transformers and PEFT for the whole process as it is imported.
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=base,
        max_seq_length=config.max_seq_length,
        load_in_4bit=config.load_in_4bit,
        dtype=dtype_for(config, device),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(TARGETS),
        use_gradient_checkpointing="unsloth",
        random_state=config.seed,
    )
    return Loaded(model, model.peft_config["default"], prefix_sharing=False)
