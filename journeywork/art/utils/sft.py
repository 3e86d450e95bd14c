"""Supervised fine-tuning on conversations: files, batches and learning rates."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from journeywork.art.refused import refusing
from journeywork.art.supervised import batches_of
from journeywork.art.types import TrainSFTConfig

if TYPE_CHECKING:
    from journeywork.art.trajectories import Trajectory

__getattr__ = refusing(__name__)
Schedule = Literal["cosine", "linear", "constant"]


class SFTChunk(NamedTuple):
    """A part of a data set, for one call of `model.train_sft`."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    """Batches before it, of all epochs."""
    epoch: int
    epoch_step: int
    """Batches of its epoch before it."""


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """Return the learning rate of each update: it rises from `min_lr` to `peak_lr` in `warmup_steps`, then stays, or
    falls to `min_lr` at the last update, in a line or in half a cosine. Raises `ValueError` for another method."""
    if method not in get_args(Schedule):
        raise ValueError(f"the schedule must be one of {', '.join(get_args(Schedule))}, not {method!r}")
    rates = []
    last = max(total_steps - warmup_steps - 1, 1)
    for step in range(total_steps):
        done = (step - warmup_steps) / last
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[method]
        share = (step + 1) / warmup_steps if step < warmup_steps else left
        rates.append(min_lr + (peak_lr - min_lr) * share)
    return rates


def create_sft_dataset_iterator(
    trajectories: list[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """Yield the chunks of a data set, of `chunk_size` batches each, with the learning rates of one schedule over all of
    it. Each chunk is a step of the model: `await model.train_sft(chunk.trajectories, chunk.config)`.

    `initial_step` skips the chunks that end before that batch. `show_progress` has no effect. Raises `ValueError`."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    _check_options(epochs, batch_size, peak_lr, warmup_ratio)
    an_epoch = math.ceil(len(trajectories) / batch_size)
    total = an_epoch * epochs
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))
    number = 0
    for epoch in range(epochs):
        order = list(trajectories)
        if shuffle:
            random.Random(seed + epoch).shuffle(order)
        for first in range(0, an_epoch, chunk_size):
            batches = min(chunk_size, an_epoch - first)
            step = epoch * an_epoch + first
            number += 1
            if number <= initial_step // chunk_size:
                continue
            config = TrainSFTConfig(learning_rate=rates[step : step + batches], batch_size=batch_size)
            yield SFTChunk(
                order[first * batch_size : (first + batches) * batch_size], config, step, epoch, first
            )


async def train_sft_from_file(
    model: Any,
    file_path: str,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: Any = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10000,
) -> None:
    """Fine-tune the model on a JSONL file, one conversation (`messages`, and perhaps `tools`) a line: one step, before,
    between or after steps of `train`.

    The learning rate rises to `peak_lr` in the first `warmup_ratio` of the updates and then follows `schedule_type`;
    of the updates those from `initial_step` to before `final_step` are taken. The conversations are shuffled in each
    epoch, all of them, whatever `shuffle_buffer_size` is. `_config` and `verbose` have no effect. Raises as
    `model.train_sft` does; `ValueError` for an option that is out of range, and for a line that holds no conversation,
    which it names; `OSError` if the file can't be read."""
    _check_options(epochs, batch_size, peak_lr, warmup_ratio)
    chats = await asyncio.to_thread(read_chats, Path(file_path))
    batches: list[list[Any]] = []
    for epoch in range(epochs):
        order = list(chats)
        random.Random(42 + epoch).shuffle(order)
        batches += batches_of(order, batch_size)
    rates = create_lr_schedule(len(batches), peak_lr, schedule_type, int(len(batches) * warmup_ratio))
    steps = slice(initial_step, final_step)
    await cast(Any, model.backend()).train_sft(model, batches[steps], rates[steps])


def _check_options(epochs: int, batch_size: int, peak_lr: float, warmup_ratio: float) -> None:
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size must be at least 1, not {epochs} and {batch_size}")
    if not (peak_lr > 0 and 0 <= warmup_ratio < 1):
        raise ValueError(
            f"peak_lr must be above 0, and warmup_ratio from 0 to below 1; not {peak_lr} and {warmup_ratio}"
        )


def read_chats(path: Path) -> list[dict[str, Any]]:
    """Return the conversations of a JSONL file. Raises `ValueError`, which names the line that holds none."""
    chats: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                chat = json.loads(line)
                roles = [message["role"] for message in chat["messages"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}, line {number}: write {{"messages": [{{"role": ..., "content": ...}}, ...]}}'
                ) from error
            if "assistant" not in roles:
                raise ValueError(
                    f"{path}, line {number} has no message of the assistant, so nothing to train"
                )
            chats.append({name: chat[name] for name in ("messages", "tools") if chat.get(name)})
    if not chats:
        raise ValueError(f"{path} holds no conversation")
    return chats
