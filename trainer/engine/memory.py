"""Estimates the memory of a training step from short forward passes.

Two forward passes, one of twice as many tokens as the other, show how many bytes autograd saves for the backward pass
per token, for any architecture, type, LoRA rank and checkpointing. The estimate adds the weights, the adapter's
gradient and Adam's two moments, the logits (one chunk at a time is held), and the dense masks of a prefix tree, which
grow with the square of its tokens. With gradient checkpointing, a token costs what is saved over all layers, plus what
one layer saves while it is recomputed.
"""

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
"""Tokens of the shorter of the two measured passes."""
_COPIES_OF_LOGITS = 4
"""The logits in the model's type and in float32, their log-softmax, and the gradient."""
_BACKWARD_OVERHEAD = 1.1
"""Factor for temporary tensors of the backward pass: at most a tenth of the saved tensors, as measured."""


@dataclass(frozen=True)
class Memory:
    """The memory of a training step, in bytes."""

    weights: int
    """The base model and the adapter."""
    optimizer: int
    """The adapter's gradient and Adam's two moments."""
    per_token: int
    """Peak of activations in the backward pass, per token of a pass."""
    logits: int
    """The chunk of logits that is held at once, with its copies."""
    per_pair: int
    """The dense masks of a prefix tree that fills a pass, per pair of tokens."""
    free: int | None
    """Free memory of the device with the weights loaded, before a step. `None` if it can't be determined."""

    def step(self, tokens: int) -> int:
        """Return the peak memory of a step whose passes hold `tokens` tokens each."""
        return (
            self.weights
            + self.optimizer
            + int(_BACKWARD_OVERHEAD * (self.per_token * tokens + self.logits) + self.per_pair * tokens**2)
        )

    def tokens(self, share: float = 0.9) -> int | None:
        """Return how many tokens of a pass fit into `share` of the free memory. `None` if that is unknown."""
        if self.free is None:
            return None
        available = share * self.free - self.optimizer - _BACKWARD_OVERHEAD * self.logits
        per_token = _BACKWARD_OVERHEAD * max(self.per_token, 1)
        if available <= 0:
            return 0
        # The positive root of per_pair * n^2 + per_token * n = available, in the form that holds for per_pair = 0 too.
        return int(2 * available / (per_token + (per_token**2 + 4 * self.per_pair * available) ** 0.5))


def free_bytes(device: torch.device, share: float = 0.0) -> int | None:
    """Return the free memory in bytes: of the GPU, or of the host if the device is the CPU.

    `share` above 0 limits this process to that share of the GPU's memory. Returns `None` on a host without
    /proc/meminfo."""
    if device.type == "cuda":
        free, total = (int(n) for n in torch.cuda.mem_get_info(device))
        used = int(torch.cuda.memory_allocated(device))
        free += int(torch.cuda.memory_reserved(device)) - used  # cached by PyTorch's allocator and not in use
        return max(0, min(free, int(share * total) - used)) if share else free
    try:
        with open("/proc/meminfo") as file:  # noqa: PTH123 - a file of the kernel
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None  # not Linux
    return None


def _saved_bytes(model: PolicyModel, tokens: int) -> int:
    """Return the bytes that autograd saves in a forward pass of the trunk over `tokens` tokens, without weights."""
    sequence = TokenSequence.made_up("memory", np.arange(tokens + 1) % model.vocabulary, tokens)
    weights = _sizes_by_address(model)
    saved: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor is kept, so that its address is not used again during the pass.
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.forward.hidden(padded([sequence]).to(model.device))
    del hidden
    return sum(size for size, _ in saved.values())


def _per_token(model: PolicyModel) -> int:
    """Return the bytes that autograd saves for each additional token of a pass."""
    return max(0, (_saved_bytes(model, 2 * _TOKENS) - _saved_bytes(model, _TOKENS)) // _TOKENS)


@contextmanager
def _without_checkpointing(model: PolicyModel) -> Iterator[None]:
    """Switch gradient checkpointing off inside the context."""
    switched = [m for m in model.model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


def _peak_per_token(model: PolicyModel) -> int:
    """Return the activation bytes per token at the peak of the backward pass."""
    saved = _per_token(model)
    if not model.checkpointing or model.config.engine == "unsloth":
        return saved
    with _without_checkpointing(model):
        all_layers = _per_token(model)
    layers = int(getattr(model.forward.text, "num_hidden_layers", None) or 1)
    return saved + -(-all_layers // layers)  # the backward pass recomputes one layer at a time


def estimate(model: PolicyModel, *, shares_prefixes: bool) -> Memory:
    """Estimate the memory of a training step of `model`. `shares_prefixes`: whether passes may be prefix trees."""
    adapter = sum(p.numel() * p.element_size() for p in model.parameters)
    chunk = min(model.config.memory.tokens_per_batch, model.logits_at_once)
    itemsize = torch.promote_types(model.dtype, torch.float32).itemsize
    return Memory(
        weights=sum(_sizes_by_address(model).values()),
        optimizer=3 * adapter,
        per_token=_peak_per_token(model),
        logits=_COPIES_OF_LOGITS * itemsize * chunk * model.vocabulary,
        per_pair=_per_pair(model) if shares_prefixes else 0,
        free=free_bytes(model.device, model.config.memory.gpu_share),
    )


def _per_pair(model: PolicyModel) -> int:
    """Return the bytes per pair of tokens of the dense masks: a bool and the kernel's copy, for each attention span."""
    if model.config.memory.attention == "flex":
        return 0
    spans = len(set((attention_spans(model.forward.text) or {}).values()))
    return int(spans * (1 + model.dtype.itemsize))


def _sizes_by_address(model: PolicyModel) -> dict[int, int]:
    """Return the bytes of each parameter and buffer by its address, tied ones once."""
    storages = (t.untyped_storage() for t in (*model.model.parameters(), *model.model.buffers()))
    return {s.data_ptr(): s.nbytes() for s in storages}
