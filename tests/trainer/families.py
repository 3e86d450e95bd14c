"""Tiny random models of many families, made from their configurations."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED: dict[str, Any] = _MOE | {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_MLA: dict[str, Any] = _ROUTED | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_WINDOW: dict[str, Any] = {"sliding_window": 8, "num_hidden_layers": 4}
_PER_LAYER: dict[str, Any] = _WINDOW | {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}

SHARED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "gemma": {},
    "olmo2": {},
    "glm": {},
    "glm4": {},
    "stablelm": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "phi": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "granite": {
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "cohere": {"logit_scale": 0.25},
    "mistral": {"sliding_window": 8},
    "ministral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "starcoder2": {"sliding_window": 8},
    "olmo3": _WINDOW,
    "exaone4": _WINDOW,
    "cohere2": _WINDOW | {"logit_scale": 0.25},
    "gemma2": {
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    },
    "gemma4_text": _PER_LAYER | {"global_head_dim": 16, "num_global_key_value_heads": 1},
    "gemma3n_text": _PER_LAYER | {"laurel_rank": 4, "num_kv_shared_layers": 0},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 1,
    },
    "qwen2_moe": _MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _MOE | {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": _MOE | {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "glm4_moe": _ROUTED,
    "dots1": _ROUTED,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
}
"""Families whose prefixes can be shared, and how their configuration differs from `_COMMON`."""

ROWS: dict[str, dict[str, Any]] = {
    "qwen3_next": _LINEAR | _MOE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _LINEAR,
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 4,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8, "lm_head_multiplier": 0.5},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    "bloom": {"n_layer": 2, "n_head": 4},
}
"""Families that get a row for each sequence: their layers carry a state, or their attention takes no mask of ours."""


def make(family: str, folder: Path, **changed: Any) -> str:
    """A model of `family` with weights large enough for a wrong mask or scale to show; returns its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_COMMON | (SHARED | ROWS)[family] | changed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)
