"""LoRA adapters with random weights on every linear layer of the demo's base model, as the demo trains them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

BASE = Path(__file__).parent.parent.parent / "examples" / "tictactoe" / "model"
RANK = 8


def adapter_files(seed: int, scale: float = 0.05) -> dict[str, bytes]:
    """The files of an adapter of rank `RANK` in PEFT's format, by name. `scale`: the standard deviation of matrix B."""
    model = json.loads((BASE / "config.json").read_text())
    hidden, inner, head = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    queries, keys = model["num_attention_heads"] * head, model["num_key_value_heads"] * head
    layers = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    random = np.random.default_rng(seed)
    tensors = {}
    for number in range(model["num_hidden_layers"]):
        for name, (inputs, outputs) in layers.items():
            prefix = f"base_model.model.model.layers.{number}.{name}"
            a, b = random.normal(size=(RANK, inputs)), random.normal(size=(outputs, RANK))
            tensors[f"{prefix}.lora_A.weight"] = (a / inputs**0.5).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = (scale * b).astype(np.float32)
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "base_model_name_or_path": str(BASE),
    }
    return {"adapter_config.json": json.dumps(settings).encode(), "adapter_model.safetensors": save(tensors)}


def write_adapter(folder: Path, seed: int) -> None:
    """Write the files of an adapter into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in adapter_files(seed).items():
        (folder / name).write_bytes(content)
