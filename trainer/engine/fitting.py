"""Fits passes into memory: passes get smaller when memory runs out, and sequences that do not fit alone are left
out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Example
from trainer.batches.packing import MicroBatch
from trainer.batches.sequences import TokenSequence
from trainer.engine.budget import Budget, PassTooLargeError, is_out_of_memory
from trainer.engine.state import UntrainableError

log = get_logger("trainer.engine.fitting")

T = TypeVar("T")


class NothingFitsError(UntrainableError):
    """Memory does not hold a pass of any of a step's `sequences`."""

    def __init__(self, sequences: Sequence[TokenSequence], step: int) -> None:
        super().__init__(
            f"step {step} is not taken: memory holds none of its {len(sequences)} sequences even alone, the longest of "
            f"{max(len(s.ids) for s in sequences)} tokens"
        )
        self.sequences = tuple(sequences)


@dataclass(frozen=True, eq=False)
class Fitted(Generic[T]):
    """The result of work over the examples that fit into memory."""

    result: T
    examples: Sequence[Example]
    groups: Sequence[int]
    """The examples that took part and the group of each."""
    dropped: tuple[TokenSequence, ...]
    """Sequences that memory does not hold even alone."""


def over_what_fits(
    work: Callable[[Sequence[Example], Sequence[int]], T],
    examples: Sequence[Example],
    groups: Sequence[int],
    budget: Budget,
    free: Callable[[], None],
    step: int,
) -> Fitted[T]:
    """Do `work` over the examples that memory holds. `free` releases what a failed try holds; `step` is named in
    messages.

    A pass that runs out of memory halves `budget`, and all the work is done again. A sequence that fails alone,
    twice, is left out. Raises `NothingFitsError` where none is left, and whatever else `work` raises."""
    before = budget.tokens
    failed_alone: TokenSequence | None = None
    dropped: list[TokenSequence] = []
    while True:
        try:
            result = work(examples, groups)
            break
        except RuntimeError as error:
            alone = _out_of_memory(budget, error)
        free()
        if alone is None:
            continue
        sequence = examples[alone].sequence
        if sequence is not failed_alone:
            failed_alone = sequence  # once more, with the memory that is free now
            continue
        log.error(
            "a sequence is not trained: memory does not hold a pass of it alone; use a shorter limit of tokens for "
            "trajectories, a smaller LoRA rank, more trainer processes on more GPUs or a GPU with more memory",
            trajectory=sequence.trajectory, tokens=len(sequence.ids), step=step,
        )  # fmt: skip
        dropped.append(sequence)
        examples = [e for i, e in enumerate(examples) if i != alone]
        groups = [g for i, g in enumerate(groups) if i != alone]
        if not examples:
            raise NothingFitsError(dropped, step)
    if dropped:
        budget.restore(before)
    return Fitted(result, examples, groups, tuple(dropped))


def check_within(
    budget: Budget, free: Callable[[], None], work: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """The metrics of a check, with smaller passes where memory runs out. A check that does not fit at all is left
    out."""
    while True:
        try:
            return work()
        except RuntimeError as error:
            alone = _out_of_memory(budget, error)
        free()
        if alone is not None:
            log.error("a check of the step is left out: memory does not hold a pass of one sequence")
            return {"checks_left_out": 1.0}


def _out_of_memory(budget: Budget, error: RuntimeError) -> int | None:
    """The index of the sequence that did not fit alone, or `None` after `budget` was halved.

    Raises any other error, and one that a smaller budget does not help."""
    if not is_out_of_memory(error):
        raise error
    if isinstance(error, PassTooLargeError) and error.alone is not None:
        return error.alone
    if budget.tokens <= 1:
        raise error
    budget.halve(error.tokens if isinstance(error, PassTooLargeError) else budget.tokens)
    log.warning(
        "out of memory: the token budget of a pass is halved", budget=budget.tokens, error=str(error).splitlines()[0]
    )  # fmt: skip
    return None


@contextmanager
def within_memory(batch: MicroBatch) -> Iterator[None]:
    """Raise `PassTooLargeError` where memory runs out in the pass of `batch`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PassTooLargeError) or not is_out_of_memory(error):
            raise
        raise PassTooLargeError(
            batch.indices, batch.layout.ids_RL.numel(), str(error).splitlines()[0]
        ) from error
