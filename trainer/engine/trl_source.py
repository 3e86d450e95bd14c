"""TRL's own `GRPOTrainer` and `GRPOConfig`, also in a process in which Unsloth is imported.

Unsloth rebinds `trl.GRPOTrainer` and `trl.GRPOConfig` to generated classes, whose loss leaves out the importance
weights and the entropy bonus. TRL's files are therefore loaded here a second time, under module names that Unsloth does
not look for. `require_own` shows that a class got its loss from them.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pipeline.config import ConfigError


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
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
        temperature: float, chunk: int, softcapping: float | None, scale: float | None, outputs: Any,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """The logprobs of `labels` [n], the entropy [n], no sum of squares, the mean logit [n], and whether a label is
        the most probable token [n]. `hidden`: [n, d]."""
        logits = torch.nn.functional.linear(hidden, weight, bias) * (scale or 1.0)
        if softcapping:
            logits = softcapping * torch.tanh(logits / softcapping)
        logprobs = (logits / temperature).float().log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        of_labels = logprobs.gather(-1, labels[:, None])[:, 0]
        return of_labels, entropy, None, logits.mean(-1), logits.argmax(-1) == labels


@contextmanager
def plain_logprobs(device: str) -> Iterator[None]:
    """Let TRL's supervised trainers run on a CPU."""
    with trl_imports():
        from trl.trainer import utils
    fused = utils._ChunkedLogProbFunction
    if device == "cpu":
        utils._ChunkedLogProbFunction = _PlainLogprobs
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = fused


def _load(file: str) -> ModuleType:
    """Load `file` of the package `trl.trainer` again, as a module of that package with another name."""
    original = importlib.util.find_spec(f"trl.trainer.{file}")
    assert original is not None
    assert original.origin is not None
    name = f"trl.trainer._journeywork_{file}_source"
    spec = importlib.util.spec_from_file_location(name, original.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


with trl_imports():
    _trainer, _config = _load("grpo_trainer"), _load("grpo_config")

GRPOTrainer: Any = _trainer.GRPOTrainer
GRPOConfig: Any = _config.GRPOConfig

_OF_THE_LOSS = ("compute_loss", "_compute_loss", "get_off_policy_mask", "get_gamma_weights")
"""The methods of `GRPOTrainer` that compute the loss."""


def require_own(trainer: type, config: type) -> None:
    """Raise `ConfigError` unless `trainer` inherits its loss, and `config` its fields, from TRL's own files."""
    source = str(_trainer.__file__)
    foreign = [name for name in _OF_THE_LOSS if _file_of(getattr(trainer, name, None)) != source]
    foreign += [c.__qualname__ for c in config.__mro__ if c.__name__ == "GRPOConfig" and c is not GRPOConfig]
    if GRPOTrainer not in trainer.__mro__ or GRPOConfig not in config.__mro__ or foreign:
        raise ConfigError(
            f"the loss is not TRL's own ({', '.join(foreign) or 'the base class'}): a library replaced parts of "
            f"{Path(source).parent.parent}; train with trainer.engine `transformers`, or report its version"
        )


def _file_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)  # TRL's decorators measure time, for example
    return str(code.co_filename) if code is not None else ""
