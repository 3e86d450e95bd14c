"""A step's passes within the memory that there is: smaller ones where it runs out, and without what does not fit at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pipeline.telemetry.logs import get_logger
from trainer.batches.groups import Example
from trainer.batches.packing import MicroBatch
from trainer.batches.sequences import TokenSequence
from trainer.engine.budget import PassTooLargeError, is_out_of_memory
from trainer.engine.state import UntrainableError

if TYPE_CHECKING:
    from trainer.engine.engine import Engine

log = get_logger("trainer.engine.fitting")


def backward_what_fits(
    engine: Engine, examples: Sequence[Example], groups: Sequence[int], step: int
) -> tuple[dict[str, float], Sequence[Example], Sequence[int], tuple[TokenSequence, ...]]:
    """`Engine.backward` over what memory holds: its metrics, the examples that took part with their groups, and what was left out.

    Raises `UntrainableError` where nothing is left."""
    before = engine.budget.tokens
    failed_alone: TokenSequence | None = None
    dropped: list[TokenSequence] = []
    while True:
        try:
            metrics = engine.backward(examples, groups, step)
            break
        except RuntimeError as error:
            alone = _out_of_memory(engine, error)
        free(engine)
        if alone is None:
            continue
        sequence = examples[alone].sequence
        if sequence is not failed_alone:
            failed_alone = sequence  # once more, with the memory that is free now
            continue
        log.error(
            "a sequence is not trained: memory does not hold a pass of it alone; use a shorter limit of tokens for trajectories, "
            "a smaller trainer.lora.rank, trainer.processes on more GPUs or a GPU with more memory",
            trajectory=sequence.trajectory, tokens=len(sequence.ids), step=step + 1,
        )  # fmt: skip
        dropped.append(sequence)
        examples = [e for i, e in enumerate(examples) if i != alone]
        groups = [g for i, g in enumerate(groups) if i != alone]
        if not examples:
            raise UntrainableError(
                f"step {step + 1} is not taken: memory holds none of its {len(dropped)} sequences even alone, the longest of "
                f"{max(len(s.ids) for s in dropped)} tokens"
            )
    if dropped:
        engine.budget.restore(before)
    metrics["sequences_dropped"] = float(len(dropped))
    metrics["tokens_dropped"] = float(sum(s.trained_tokens for s in dropped))
    return metrics, examples, groups, tuple(dropped)


def check(engine: Engine, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """A check's metrics, with smaller passes where memory runs out. A check that does not fit at all is left out."""
    while True:
        try:
            return work()
        except RuntimeError as error:
            alone = _out_of_memory(engine, error)
        free(engine)
        if alone is not None:
            log.error("a check of the step is left out: memory does not hold a pass of one sequence")
            return {"checks_left_out": 1.0}


def _out_of_memory(engine: Engine, error: RuntimeError) -> int | None:
    """What to do about memory that ran out: the place of the sequence that did not fit alone, or `None` where passes were made
    smaller. Raises any other error, and one that smaller passes do not help."""
    if not is_out_of_memory(error):
        raise error
    if isinstance(error, PassTooLargeError) and error.alone is not None:
        return error.alone
    if engine.budget.tokens <= 1:
        raise error
    engine.budget.halve(error.tokens if isinstance(error, PassTooLargeError) else engine.budget.tokens)
    log.warning(
        "out of memory: going on with half the token budget",
        budget=engine.budget.tokens, error=str(error).splitlines()[0],
    )  # fmt: skip
    return None


def free(engine: Engine) -> None:
    """Let go of what a failed pass held. Outside of the handler: the error's traceback holds on to its tensors."""
    engine.model.zero_grad(set_to_none=True)
    engine.trainer.take_metrics()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


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
