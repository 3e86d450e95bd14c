"""TRL's trainers, which `journeywork train --as sft|dpo|kto` runs, without vLLM and on a CPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def trl_imports() -> Iterator[None]:
    """Import TRL without the warnings that libraries raise about their own code, and without vLLM.

    TRL would import vLLM if it is installed, which takes seconds and memory. An entry of `None` in `sys.modules` makes
    `import vllm` raise `ImportError`."""
    loaded = sys.modules.get("vllm")
    sys.modules["vllm"] = None  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            del sys.modules["vllm"]
            if loaded is not None:
                sys.modules["vllm"] = loaded


class _PlainLogprobs:
    """TRL's fused LM head (`trl.kernels.ChunkedLogProbFunction`) in plain PyTorch: the fused one is a GPU kernel."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        chunk: int,
        softcapping: float | None,
        scale: float | None,
        outputs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return what the fused function returns: the logprobs of `labels` [n], the entropies [n], `None` for the sum
        of squares, the mean logits [n], and whether each label is the most probable token [n]. `hidden`: [n, d]."""
        logits = torch.nn.functional.linear(hidden, weight, bias) * (scale or 1.0)
        if softcapping:
            logits = softcapping * torch.tanh(logits / softcapping)
        logprobs = (logits / temperature).float().log_softmax(-1)
        of_labels = logprobs.gather(-1, labels[:, None])[:, 0]
        with torch.no_grad():  # TRL only reports the rest
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return of_labels, entropy, None, logits.mean(-1), logits.argmax(-1) == labels


@contextmanager
def plain_logprobs(device: str) -> Iterator[None]:
    """Let TRL's supervised trainers run on the device: on a CPU with plain PyTorch in place of their GPU kernel, and as
    on a GPU only for the trained tokens. TRL itself computes the logits of every token there."""
    with trl_imports():
        from trl.trainer import utils
    plain: dict[str, Any] = {"_ChunkedLogProbFunction": _PlainLogprobs, "_use_triton": lambda _: True}
    # TRL 1.15 has no `_use_triton`.
    fused = {name: getattr(utils, name) for name in plain if device == "cpu" and hasattr(utils, name)}
    for name in fused:
        setattr(utils, name, plain[name])
    try:
        yield
    finally:
        for name, original in fused.items():
            setattr(utils, name, original)
