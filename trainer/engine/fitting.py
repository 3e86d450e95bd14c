"""Runs passes in the available memory: retries with smaller passes when memory runs out, and drops sequences that do
not fit even alone.

The first resort is gradient checkpointing, if the settings leave that to the trainer (`Budget.save_memory`). After it,
the token budget of a pass halves when a pass of several sequences runs out of memory, and stays so until the trainer
starts again. A sequence that runs out of memory in a pass of its own does not halve it, and is dropped when that
happens twice. Then the budget is again what it was before that batch, because the sequence may have caused the batch's
halvings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from pipeline.telemetry.logs import get_logger
from trainer.batches.examples import Example
from trainer.batches.packing import MicroBatch
from trainer.engine.state import UntrainableError
from trainer.sequences import TokenSequence

logger = get_logger("trainer.engine.fitting")

T = TypeVar("T")


class PassTooLargeError(RuntimeError):
    """A forward or backward pass ran out of memory."""

    def __init__(self, indices: Sequence[int], tokens: int, why: str) -> None:
        """`indices`: of the pass's sequences in the batch; `tokens`: of the pass, padding included; `why`: message of
        the original error."""
        super().__init__(indices, tokens, why)  # all arguments, so that the error can be pickled
        self.indices, self.tokens, self.why = tuple(indices), tokens, why

    def __str__(self) -> str:
        return f"out of memory in a pass of {len(self.indices)} sequence(s) and {self.tokens} tokens: {self.why}"

    @property
    def only_index(self) -> int | None:
        """The index of the pass's sequence in the batch; `None` if the pass held several."""
        return self.indices[0] if len(self.indices) == 1 else None


_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""In the messages of errors that have no class of their own: of host memory, of the driver, and of CUDA's libraries,
such as `CUBLAS_STATUS_ALLOC_FAILED`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch ran out of device memory or of host memory."""
    return isinstance(error, torch.OutOfMemoryError | PassTooLargeError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


class Budget:
    """The token budget of a pass over one engine's model. `limit` is `trainer.memory.tokens_per_batch`."""

    def __init__(self, limit: int, save_memory: Callable[[], bool] = lambda: False) -> None:
        """`save_memory` is tried before the budget is halved: it makes passes need less memory (gradient
        checkpointing), and returns whether it changed anything."""
        self._limit, self.save_memory = limit, save_memory
        self.tokens = limit
        """The current budget."""

    def set_limit(self, limit: int) -> None:
        """Set the configured limit. A budget that was reduced because memory ran out is not raised."""
        self.tokens = limit if self.tokens == self._limit else min(self.tokens, limit)
        self._limit = limit


class NothingFitsError(UntrainableError):
    """No sequence of a step fits in memory, even alone, or into the model's length. `sequences` holds them."""

    reason = "too_large"

    def __init__(self, sequences: Sequence[TokenSequence], step: int) -> None:
        super().__init__(
            f"step {step} skipped: none of its {len(sequences)} sequences fits in memory on its own, or into the "
            f"model's length (longest: {max(len(s.ids) for s in sequences)} tokens)"
        )
        self.sequences = tuple(sequences)


@dataclass(frozen=True, eq=False)
class Fitted(Generic[T]):
    """The result of some work over the examples that fit in memory."""

    result: T
    examples: Sequence[Example]
    """The examples that fit."""
    group_of: Sequence[int]
    """`group_of[i]` is the group of `examples[i]`."""
    dropped: tuple[TokenSequence, ...]
    """Sequences that do not fit in memory even alone."""


def run_within_memory(
    work: Callable[[Sequence[Example], Sequence[int]], T],
    examples: Sequence[Example],
    group_of: Sequence[int],
    budget: Budget,
    free: Callable[[], None],
    step: int,
) -> Fitted[T]:
    """Return the result of `work(examples, group_of)`, without the sequences that do not fit in memory.

    When a pass of several sequences runs out of memory, the token budget of a pass is halved and `work` is called
    again. When a pass of one sequence runs out of memory twice, that sequence is dropped. `free` releases the memory
    that a failed attempt still holds; `step` is for messages. Raises `NothingFitsError` if every sequence was dropped,
    and any other error of `work`."""
    before = budget.tokens
    failed_once: TokenSequence | None = None
    dropped: list[TokenSequence] = []
    while True:
        try:
            result = work(examples, group_of)
            break
        except RuntimeError as error:
            only_index = _handle_out_of_memory(budget, error)
        free()
        if only_index is None:
            continue
        sequence = examples[only_index].sequence
        if sequence is not failed_once:
            failed_once = sequence  # retried once, because `free` may have made room for it
            continue
        logger.error(
            "sequence dropped: it does not fit in memory even alone; lower the token limit of trajectories or the LoRA "
            "rank, or use more trainer processes on more GPUs, or a GPU with more memory",
            trajectory=sequence.trajectory,
            tokens=len(sequence.ids),
            step=step,
        )
        dropped.append(sequence)
        examples = [e for i, e in enumerate(examples) if i != only_index]
        group_of = [g for i, g in enumerate(group_of) if i != only_index]
        if not examples:
            raise NothingFitsError(dropped, step)
    if dropped:
        budget.tokens = before  # the dropped sequences may have caused the halvings
    return Fitted(result, examples, group_of, tuple(dropped))


def check_within_memory(
    budget: Budget, free: Callable[[], None], work: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Return the metrics that `work` computes. When memory runs out, the token budget of a pass is halved and `work` is
    called again.

    If one sequence does not fit even alone, the check is skipped and the metric `checks_left_out` is 1."""
    while True:
        try:
            return work()
        except RuntimeError as error:
            only_index = _handle_out_of_memory(budget, error)
        free()
        if only_index is not None:
            logger.error("a check of the step is skipped: a pass of one sequence does not fit in memory")
            return {"checks_left_out": 1.0}


def _handle_out_of_memory(budget: Budget, error: RuntimeError) -> int | None:
    """Make the next attempt need less memory: switch gradient checkpointing on, or halve the token budget of a pass.

    If the failed pass held only one sequence and checkpointing could not be switched on, change nothing and return the
    sequence's index in the batch, else `None`. Re-raises `error` if it is no out-of-memory error, or if the budget
    can't be made smaller."""
    if not is_out_of_memory(error):
        raise error
    if budget.save_memory():
        logger.warning("out of memory: gradient checkpointing is on from now on", error=_first_line(error))
        return None
    if isinstance(error, PassTooLargeError) and error.only_index is not None:
        return error.only_index
    if budget.tokens <= 1:
        raise error
    # Half of the tokens that the failed pass held, which may be fewer than the budget allows.
    tried = error.tokens if isinstance(error, PassTooLargeError) else budget.tokens
    budget.tokens = max(1, min(budget.tokens, tried) // 2)
    logger.warning("out of memory: halved the token budget of a pass", budget=budget.tokens, error=_first_line(error))
    return None


def _first_line(error: BaseException) -> str:
    """Return the first line of the message; the name of the error's type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def detect_out_of_memory(batch: MicroBatch) -> Iterator[None]:
    """Raise `PassTooLargeError` if memory runs out inside the `with` block, which runs the pass of `batch`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PassTooLargeError) or not is_out_of_memory(error):
            raise
        raise PassTooLargeError(batch.indices, batch.layout.ids_RL.numel(), _first_line(error)) from error
