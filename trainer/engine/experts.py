"""Adapters on the experts of a mixture of experts (`trainer.lora.experts`).

transformers keeps the E experts of a layer as two stacked parameters. PEFT adapts them as such: `lora_A` has the rows
of one expert after the other, [E * rank, in], and `lora_B`, [out, rank * E], has the E columns of the same rank side by
side. vLLM reads both in this layout, which it calls 3D, of models of every family if it was started with
`--enable-mixed-moe-lora-format` and is told so when it loads the adapter. But it looks for them under the name that its
own code gives the experts, and ignores others without an error.
"""

from __future__ import annotations

from typing import Any

from pipeline.config import ConfigError, TrainerConfig

PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of the names of the parameters that get an adapter. vLLM needs both."""
_IN_TRANSFORMERS = ".mlp.experts."
IN_VLLM = {
    "gpt_oss": ".mlp.experts.",
    "mixtral": ".block_sparse_moe.experts.",
    "olmoe": ".mlp.experts.",
    "qwen2_moe": ".mlp.experts.",
    "qwen3_moe": ".mlp.experts.",
}
"""`model_type` of the families whose layout was compared with vLLM's, to its name of a layer's experts."""


def parameters_to_adapt(model: Any, config: TrainerConfig) -> list[str] | None:
    """Return the ends of the names of the stacked parameters that get an adapter; `None` without adapters on experts.

    Raises `ConfigError` if the model's experts can't have one."""
    if not config.lora.experts:
        return None
    if (family := model.config.model_type) not in IN_VLLM:
        raise ConfigError(
            f"trainer.lora.experts: the experts of {family} can't have an adapter, only those of "
            f"{', '.join(IN_VLLM)} can: set it to false"
        )
    # PEFT would leave them out with a warning: experts in four bits are other parameters.
    if not any(n.endswith(PARAMETERS) and p.is_floating_point() for n, p in model.named_parameters()):
        raise ConfigError(
            f"trainer.lora.experts: this {family} has no experts in floating point: set it to false, or take a base "
            "model whose experts are not quantised"
        )
    return list(PARAMETERS)


def served_name(name: str, family: str) -> str:
    """Return the name of an adapter's tensor under which vLLM looks for it. PEFT loads it under this name too."""
    return name.replace(_IN_TRANSFORMERS, IN_VLLM.get(family, _IN_TRANSFORMERS))
