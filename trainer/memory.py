"""What memory a training step takes, measured on a short pass and extrapolated.

PyTorch tells what it keeps for the backward pass as it keeps it. A pass over a few tokens and one over twice as many give the
bytes that each token costs on any architecture, with the type, rank and checkpointing that are set. To these come the weights,
the adapter with its gradient and Adam's two moments, and the logits, of which one piece at a time is held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.packing import padded
from trainer.sequences import TokenSequence

if TYPE_CHECKING:
    from trainer.engine import Engine

_TOKENS = 32
_COPIES_OF_LOGITS = 4
"""Logits in the model's type and in float32, their log-softmax, and the gradient."""
_TRANSIENT = 1.1
"""What the backward pass needs beside what was kept for it: measured at up to a tenth."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    """The base model and the adapter."""
    optimizer: int
    """The adapter's gradient and Adam's two moments."""
    per_token: int
    """Kept for the backward pass, for each token of a pass."""
    logits: int
    """Of the piece of the logits that is held at once, for a full pass."""
    free: int | None
    """Free on the device before a step, the weights being there already; `None` where it can't be told."""

    def step(self, tokens: int) -> int:
        """Peak of a step whose passes hold `tokens` tokens."""
        return self.weights + self.optimizer + int(_TRANSIENT * (self.per_token * tokens + self.logits))

    def tokens(self, share: float = 0.9) -> int | None:
        """Tokens of a pass that fit into `share` of the free memory."""
        if self.free is None:
            return None
        room = share * self.free - self.optimizer - _TRANSIENT * self.logits
        return max(0, int(room / (_TRANSIENT * max(self.per_token, 1))))


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; of the host where the device is the CPU."""
    if device.type == "cuda":
        # What PyTorch holds and does not use is free too.
        unused: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123 - no file of ours
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None  # not Linux
    return None


def _kept(engine: Engine, tokens: int) -> int:
    """Bytes that a pass of the trunk over so many tokens keeps for the backward pass, weights not counted."""
    ids = np.arange(tokens + 1, dtype=np.int32) % engine.vocabulary
    n = len(ids)
    sequence = TokenSequence(
        "memory", ids, np.arange(n) > 0, np.zeros(n, np.float32), np.zeros(n, np.int32), np.ones(n, np.float32)
    )  # fmt: skip
    fixed = {t.untyped_storage().data_ptr() for t in (*engine.model.parameters(), *engine.model.buffers())}
    seen: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = engine.forward.hidden(padded([sequence]).to(engine.device))
    del hidden
    return sum(size for size, _ in seen.values())


def measure(engine: Engine) -> Memory:
    """What a step of `engine` takes."""
    fewer, more = _kept(engine, _TOKENS), _kept(engine, 2 * _TOKENS)
    weights = sum(t.untyped_storage().nbytes() for t in _distinct(engine.model))
    adapter = sum(p.numel() * p.element_size() for p in engine.parameters)
    tokens = engine.config.tokens_per_batch
    pieces = min(tokens, engine.logits_at_once)
    itemsize = torch.promote_types(engine.dtype, torch.float32).itemsize
    return Memory(
        weights=weights,
        optimizer=3 * adapter,
        per_token=max(0, (more - fewer) // _TOKENS),
        logits=_COPIES_OF_LOGITS * itemsize * pieces * engine.vocabulary,
        free=free_bytes(engine.device),
    )


def _distinct(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once."""
    found = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return list(found.values())
