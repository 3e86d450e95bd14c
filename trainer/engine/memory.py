"""The memory of a training step, measured on short passes and extrapolated.

PyTorch reports every tensor that it saves for the backward pass. A pass over a few tokens and one over twice as many
give the bytes per token for any architecture, with the type, rank and checkpointing of the settings. The total also
has the weights, the adapter with its gradient and Adam's two moments, one piece of the logits, and the dense masks of
a prefix tree, which grow with the square of its size. With gradient checkpointing, the bytes per token are those that
all layers save, and those of one layer while it is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.batches.packing import padded
from trainer.batches.sequences import TokenSequence
from trainer.engine.forward import attention_spans
from trainer.engine.model import PolicyModel

_TOKENS = 32
_COPIES_OF_LOGITS = 4
"""Logits in the model's type and in float32, their log-softmax, and the gradient."""
_TRANSIENT = 1.1
"""Factor for temporary memory of the backward pass: up to a tenth was measured."""


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
    """The piece of the logits that is held at once, for a full pass."""
    per_pair: int
    """Dense masks, per pair of tokens in a pass; one tree may fill the whole pass."""
    free: int | None
    """Free memory of the device before a step, with the weights loaded; `None` if it is unknown."""

    def step(self, tokens: int) -> int:
        """Peak of a step whose passes hold `tokens` tokens."""
        return (
            self.weights
            + self.optimizer
            + int(_TRANSIENT * (self.per_token * tokens + self.logits) + self.per_pair * tokens**2)
        )

    def tokens(self, share: float = 0.9) -> int | None:
        """Tokens of a pass that fit into `share` of the free memory."""
        if self.free is None:
            return None
        room = share * self.free - self.optimizer - _TRANSIENT * self.logits
        each = _TRANSIENT * max(self.per_token, 1)
        if room <= 0:
            return 0
        # The root of per_pair * n^2 + each * n = room, in the form that has no 0 / 0 where there are no masks.
        return int(2 * room / (each + (each**2 + 4 * self.per_pair * room) ** 0.5))


def free_bytes(device: torch.device, share: float = 0.0) -> int | None:
    """Free memory of the device, or of the host if the device is the CPU. A `share` other than 0 limits this process
    to that share of the device."""
    if device.type == "cuda":
        free, total = (int(n) for n in torch.cuda.mem_get_info(device))
        used = int(torch.cuda.memory_allocated(device))
        free += int(torch.cuda.memory_reserved(device)) - used  # PyTorch holds it and does not use it
        return max(0, min(free, int(share * total) - used)) if share else free
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123 - no file of ours
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None  # not Linux
    return None


def _kept(model: PolicyModel, tokens: int) -> int:
    """Bytes that a pass of the trunk over so many tokens keeps for the backward pass, weights not counted."""
    ids = np.arange(tokens + 1, dtype=np.int32) % model.vocabulary
    n = len(ids)
    sequence = TokenSequence(
        "memory", ids, np.arange(n) > 0, np.zeros(n, np.float32), np.zeros(n, np.int32), np.ones(n, np.float32)
    )  # fmt: skip
    fixed = {t.untyped_storage().data_ptr() for t in (*model.model.parameters(), *model.model.buffers())}
    seen: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.forward.hidden(padded([sequence]).to(model.device))
    del hidden
    return sum(size for size, _ in seen.values())


def _per_token(model: PolicyModel) -> int:
    """Bytes that each further token of a pass keeps for the backward pass."""
    return max(0, (_kept(model, 2 * _TOKENS) - _kept(model, _TOKENS)) // _TOKENS)


@contextmanager
def _without_checkpointing(model: PolicyModel) -> Iterator[None]:
    """Switch gradient checkpointing off within the context."""
    switched = [m for m in model.model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


def _peak_per_token(model: PolicyModel) -> int:
    """Bytes of each token of a pass at the peak of its backward pass."""
    kept = _per_token(model)
    if not model.checkpointing or model.config.engine == "unsloth":
        return kept
    with _without_checkpointing(model):
        everything = _per_token(model)
    layers = int(getattr(model.forward.text, "num_hidden_layers", None) or 1)
    return kept + -(-everything // layers)  # one layer at a time is computed again


def estimate(model: PolicyModel, *, shares_prefixes: bool) -> Memory:
    """The memory of a step of `model`; `shares_prefixes` says whether its passes may be prefix trees."""
    adapter = sum(p.numel() * p.element_size() for p in model.parameters)
    pieces = min(model.config.memory.tokens_per_batch, model.logits_at_once)
    itemsize = torch.promote_types(model.dtype, torch.float32).itemsize
    return Memory(
        weights=sum(t.untyped_storage().nbytes() for t in _distinct(model.model)),
        optimizer=3 * adapter,
        per_token=_peak_per_token(model),
        logits=_COPIES_OF_LOGITS * itemsize * pieces * model.vocabulary,
        per_pair=_per_pair(model) if shares_prefixes else 0,
        free=free_bytes(model.device, model.config.memory.gpu_share),
    )


def _per_pair(model: PolicyModel) -> int:
    """Bytes of the dense masks: a bool, and the kernel's copy in the model's type, for each kind of layer."""
    if model.config.memory.attention == "flex":
        return 0
    kinds = len(set((attention_spans(model.forward.text) or {}).values()))
    return int(kinds * (1 + model.dtype.itemsize))


def _distinct(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once."""
    found = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return list(found.values())
