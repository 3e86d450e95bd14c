"""Batches as an engine's own adapter would have sampled them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.trainer.kit import VOCAB, exchange
from trainer.batches.examples import Example
from trainer.batches.packing import padded
from trainer.engine.engine import Engine
from trainer.engine.state import TrainState
from trainer.sequences import TokenSequence, build

Configure = Callable[[dict[str, Any]], None]
"""Set these settings of an engine."""


def sampled_by(engine: Engine, state: TrainState, name: str, seed: int, step: int | None = None) -> TokenSequence:
    """A sequence with the logprobs that `state`'s adapter gives it, as a sampler would have recorded them."""
    rng = np.random.default_rng(seed)
    prompt, reply = rng.integers(2, VOCAB, 7).tolist(), rng.integers(2, VOCAB, 5).tolist()
    at = state.step if step is None else step
    (blank,) = build(name, [exchange(name, 0, prompt, reply, step=at)])
    engine.model.load_adapter(state.weights)
    with torch.no_grad():
        logprobs = engine.model.logprobs(padded([blank]), (1, 5))[0]
    (sequence,) = build(name, [exchange(name, 0, prompt, reply, logprobs=logprobs[0].tolist(), step=at)])
    return sequence


def batch(engine: Engine, state: TrainState, seed: int = 0) -> list[Example]:
    return [Example(sampled_by(engine, state, f"t{i}", seed + i), 1.0 if i % 2 else -1.0) for i in range(6)]
