"""Loads adapters on experts with vLLM's own code, and saves what each expert gets. For `test_experts`.

    python -m tests.trainer.engine.vllm_experts_child OUT FAMILY FOLDER EXPERTS HIDDEN INTERMEDIATE [FAMILY ...]

vLLM's CPU build serves no adapters on experts, because its layer needs a kernel of a GPU. Its loader, its manager and
the layer's stacked tensors need none. Only the layer's constructor, which asks for the kernel, is replaced.
"""

from __future__ import annotations

import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.models import gpt_oss, mixtral, olmoe, qwen2_moe, qwen3_moe

MODELS: dict[str, Any] = {
    "gpt_oss": gpt_oss.GptOssForCausalLM,
    "mixtral": mixtral.MixtralForCausalLM,
    "olmoe": olmoe.OlmoeForCausalLM,
    "qwen2_moe": qwen2_moe.Qwen2MoeForCausalLM,
    "qwen3_moe": qwen3_moe.Qwen3MoeForCausalLM,
}
CONFIG = SimpleNamespace(
    lora_dtype=torch.float32,
    max_lora_rank=8,
    max_loras=1,
    max_cpu_loras=1,
    fully_sharded_loras=False,
    enable_moe_shared_loras=False,
    target_modules=None,
)


class Layer(FusedMoEWithLoRA):  # type: ignore[misc]
    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        torch.nn.Module.__init__(self)
        self.moe_config = SimpleNamespace(
            hidden_dim=hidden,
            num_local_experts=experts,
            num_experts=experts,
            is_act_and_mul=True,
            intermediate_size_per_partition=intermediate,
            moe_parallel_config=SimpleNamespace(ep_rank=0, use_ep=False),
        )
        self.tp_size, self.tp_rank, self.device, self._w13_slices = 1, 0, torch.device("cpu"), 2
        self.create_lora_weights(1, CONFIG)


def place_of_experts(model: Any) -> str:
    """Return the name of the experts within a layer, by the source of vLLM's model."""
    source = inspect.getsource(sys.modules[model.__module__])
    (holder,) = set(re.findall(r"self\.(mlp|block_sparse_moe) = ", source))
    assert "self.experts = " in source
    return f"{holder}.experts"


def manager_of(model: Any, experts: int, hidden: int, intermediate: int) -> LoRAModelManager:
    manager = LoRAModelManager.__new__(LoRAModelManager)
    manager.model = SimpleNamespace(
        config=SimpleNamespace(architectures=[model.__name__]), hf_to_vllm_mapper=model.hf_to_vllm_mapper
    )
    manager.lora_config, manager.is_pooling_model, manager.moe_ep_load_spec = CONFIG, False, None
    manager.supported_modules_to_save, manager._classification_head, manager._pooling_task = set(), None, None
    # As `--enable-mixed-moe-lora-format` has it.
    manager._enable_mixed_moe_lora_format, manager._is_3d_moe_model = True, False
    manager._enable_moe_shared_loras, manager._is_non_gated_moe = False, False
    manager.supported_lora_modules = ["qkv_proj", "o_proj", "experts"]
    split = [f"experts.{e}.{name}" for e in range(experts) for name in ("gate_proj", "down_proj", "up_proj")]
    manager.packed_modules_mapping = {**model.packed_modules_mapping, "experts": split}
    manager.modules = {
        f"model.layers.{i}.{place_of_experts(model)}": Layer(experts, hidden, intermediate) for i in range(2)
    }
    manager.packed_modules = {}
    for name in manager.modules:
        manager._register_packed_modules(name)
    manager._registered_adapters = AdapterLRUCache(1, lambda _: None)
    manager._active_adapters = AdapterLRUCache(1, lambda _: None)
    manager.lora_index_to_id = [None]
    return manager


def load(model: Any, folder: str, *sizes: int) -> dict[str, torch.Tensor]:
    """Return what the layers' experts add to their weights: [E, out, in] by layer and by `gate`, `up` and `down`."""
    worker = WorkerLoRAManager.__new__(WorkerLoRAManager)
    worker._adapter_manager, worker._lora_model_cls = manager_of(model, *sizes), LoRAModel
    worker.lora_config, worker.max_position_embeddings, worker.vocab_size = CONFIG, 256, 48
    adapter = worker._load_adapter(LoRARequest("a", 1, folder, is_3d_lora_weight=True))
    worker._adapter_manager.add_adapter(adapter)
    worker._adapter_manager.activate_adapter(1)
    out = {}
    for i, layer in enumerate(worker._adapter_manager.modules.values()):
        products = {
            "gate": (layer.w13_lora_b_stacked[0], layer.w13_lora_a_stacked[0]),
            "up": (layer.w13_lora_b_stacked[1], layer.w13_lora_a_stacked[1]),
            "down": (layer.w2_lora_b_stacked[0], layer.w2_lora_a_stacked[0]),
        }
        out |= {f"{i}.{name}": (b[0] @ a[0]).clone() for name, (b, a) in products.items()}
    return out


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    rows = [rest[i : i + 5] for i in range(0, len(rest), 5)]
    torch.save({f: load(MODELS[f], folder, *map(int, sizes)) for f, folder, *sizes in rows}, out)
