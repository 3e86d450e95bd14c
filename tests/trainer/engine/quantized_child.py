"""Trains tiny models whose base is quantised, beside models whose weights are what the quantised ones stand for, and
prints figures. A process of its own, since the packages that quantise are not in the services' environment.

    python -m tests.trainer.engine.quantized_child FOLDER"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit

from pipeline.config import TrainerConfig
from tests.kits.settings import with_values
from tests.trainer import families
from tests.trainer.kit import backward, stir, tree_of_conversations
from trainer.batches.examples import Example
from trainer.engine.engine import Engine


def batch() -> tuple[list[Example], list[int]]:
    sequences, groups = tree_of_conversations()
    return [Example(sequence, (-1.0) ** n) for n, sequence in enumerate(sequences)], groups


def dequantised(weight: Any) -> torch.Tensor:
    if hasattr(weight, "quant_state"):
        return dequantize_4bit(weight.data, weight.quant_state)
    return torch.Tensor(weight.dequantize())


def bytes_of(weight: Any) -> int:
    if hasattr(weight, "quant_state"):
        return int(weight.nbytes + weight.quant_state.absmax.nbytes)
    return int(weight.qdata.nbytes + weight.scale.nbytes)


def gradient(engine: Engine) -> torch.Tensor:
    stir(engine)
    engine.model.peft.zero_grad(set_to_none=True)
    backward(engine, *batch(), 0)
    return torch.cat([p.grad.flatten() for p in engine.model.parameters if p.grad is not None])


def figures(base: str, kind: str) -> dict[str, Any]:
    config = with_values(TrainerConfig(), {"optimizer.learning_rate": 1e-2, "logprob_bound": 1e9, "lora.rank": 4})
    whole, held = (Engine(base, with_values(config, {"memory.quantization": name})) for name in ("none", kind))
    full_bytes = held_bytes = 0
    modules = dict(whole.model.peft.named_modules())
    original = gradient(whole)
    for name, module in held.model.peft.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state") or hasattr(weight, "qdata"):
            own = modules[name].weight
            full_bytes, held_bytes = full_bytes + own.nbytes, held_bytes + bytes_of(weight)
            own.data = dequantised(weight)
    expected, found = gradient(whole), gradient(held)
    held.model.move_base(torch.device("cpu"))
    state, losses = held.initial_state(), []
    for _ in range(4):
        result = held.step(state, *batch())
        state = result.state
        losses.append(result.metrics["loss"])
    again = Engine(base, held.config)
    after = [engine.step(dataclasses.replace(state), *batch()).state.weights for engine in (held, again)]
    return {
        "share": held_bytes / full_bytes,
        "losses": [losses[0], losses[-1]],
        "off": float((found - expected).norm() / expected.norm()),
        "changed": float((found - original).norm() / original.norm()),
        "same_size": held.model.multiplied_parameters == whole.model.multiplied_parameters,
        "resumed": max(float((after[0][name] - after[1][name]).abs().max()) for name in after[0]),
    }


def main() -> None:
    base = families.make("qwen3", Path(sys.argv[1], "qwen3"))
    sys.stdout.write(json.dumps({kind: figures(base, kind) for kind in ("fp8", "4bit")}) + "\n")


if __name__ == "__main__":
    main()
