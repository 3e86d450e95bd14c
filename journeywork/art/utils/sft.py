"""The chunks of a data set for supervised fine-tuning, with their learning rates.

A *chunk* is several batches of trajectories, which one call of `model.train_sft` trains as one step. The learning rates
of all chunks follow one schedule over the whole data set: a rise, then a linear fall to 0."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from journeywork.art.trajectories import Trajectory
from journeywork.art.types import TrainSFTConfig


class SFTChunk(NamedTuple):
    """A part of a data set, for one call of `model.train_sft`."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    """Batches before it, of all epochs."""
    epoch: int
    epoch_step: int
    """Batches of its epoch before it."""


def learning_rates(updates: int, peak: float, warmup: int) -> list[float]:
    """Return the learning rate of each update: it rises from 0 to `peak` in `warmup` updates, then falls in a line to 0
    at the last one."""
    last = max(updates - warmup - 1, 1)
    rising = [peak * (n + 1) / warmup for n in range(warmup)]
    return rising + [peak * (1 - n / last) for n in range(updates - warmup)]


def create_sft_dataset_iterator(
    trajectories: list[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    warmup_ratio: float = 0.1,
) -> Iterator[SFTChunk]:
    """Yield the chunks of a data set, shuffled in each epoch, of `chunk_size` batches each, with the learning rates of
    one linear schedule over all of it. Each chunk is a step of the model:
    `await model.train_sft(chunk.trajectories, chunk.config)`. Raises `ValueError`."""
    if chunk_size < 1 or epochs < 1 or batch_size < 1:
        raise ValueError(
            f"chunk_size, epochs and batch_size must be at least 1, not {chunk_size}, {epochs} and {batch_size}"
        )
    if not (peak_lr > 0 and 0 <= warmup_ratio < 1):
        raise ValueError(
            f"peak_lr must be above 0, and warmup_ratio from 0 to below 1; not {peak_lr} and {warmup_ratio}"
        )
    batches_per_epoch = math.ceil(len(trajectories) / batch_size)
    rates = learning_rates(batches_per_epoch * epochs, peak_lr, int(batches_per_epoch * epochs * warmup_ratio))
    for epoch in range(epochs):
        order = list(trajectories)
        random.Random(42 + epoch).shuffle(order)
        for first in range(0, batches_per_epoch, chunk_size):
            end, step = min(batches_per_epoch, first + chunk_size), epoch * batches_per_epoch + first
            config = TrainSFTConfig(learning_rate=rates[step : step + end - first], batch_size=batch_size)
            yield SFTChunk(order[first * batch_size : end * batch_size], config, step, epoch, first)
