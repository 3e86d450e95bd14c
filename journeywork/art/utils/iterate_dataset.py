"""Batches of a data set over several epochs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class DatasetBatch(Generic[T]):
    """The items of one step."""

    items: list[T]
    step: int
    """Number of the step over all epochs, from 0."""
    epoch: int
    epoch_step: int
    """Number of the step in its epoch, from 0."""

    def __iter__(self) -> Iterator[Any]:
        """Items, epoch, step, step in the epoch: ART's batches were such tuples before 0.4."""
        return iter((self.items, self.epoch, self.step, self.epoch_step))


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Iterator[DatasetBatch[T]]:
    """Yield the data set in batches of `groups_per_step`, shuffled anew in each epoch; the last one may be smaller.

    The order depends on the epoch and on the length only, so a program that begins at `initial_step` continues where
    another one ended. `use_tqdm` shows a progress bar on a terminal."""
    steps = -(-len(dataset) // groups_per_step)
    total = steps * num_epochs
    numbers: Iterator[int] = iter(range(initial_step, total))
    if use_tqdm and total:
        from tqdm.auto import tqdm

        numbers = iter(
            tqdm(range(initial_step, total), initial=initial_step, total=total, desc="steps", disable=None)
        )
    orders: dict[int, list[int]] = {}
    for step in numbers:
        epoch, epoch_step = divmod(step, steps)
        if epoch not in orders:
            order = list(range(len(dataset)))
            random.Random(epoch).shuffle(order)
            orders = {epoch: order}
        indices = orders[epoch][epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
        yield DatasetBatch([dataset[at] for at in indices], step, epoch, epoch_step)
