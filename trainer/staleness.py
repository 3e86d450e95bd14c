"""How old tokens may be when they are trained: `trainer.max_staleness`, counted in steps from sampling to training.

`trainer.batches.groups` leaves out groups and tokens that are older. Where `trainer.late` says so, sequences with such
tokens are corrected (`trainer.engine.loss_inputs`). The adapters of versions within `max_staleness` are kept.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

from pipeline.config import TrainerConfig
from trainer.sequences import TokenSequence


def token_bound(config: TrainerConfig, *, offline: bool, late_refused: bool) -> int:
    """Return how many steps ago a token may have been sampled. There is no bound for supervised fine-tuning, for groups
    that were sampled offline, and for late sequences that are corrected, unless the correction was refused."""
    unbounded = offline or config.late != "off"
    if config.loss.type == "sft" or (unbounded and not late_refused):
        return sys.maxsize
    return config.max_staleness


def stale_tokens(sequence: TokenSequence, step: int, bound: int, *, later_too: bool) -> npt.NDArray[np.bool_]:
    """Return which trained tokens were sampled more than `bound` steps before `step`, [T]. With `later_too` also those
    that a later version sampled, as a replay's may be."""
    lags = step - sequence.steps.astype(np.int64)
    return sequence.loss_mask & ((lags > bound) | (later_too & (lags < 0)))


def is_late(sequence: TokenSequence, step: int, config: TrainerConfig) -> bool:
    """Whether a sequence is trained with the correction of late sequences at `step`: `trainer.late` is on, the loss is
    not `sft`, and a trained token was sampled more than `max_staleness` steps before or by a later version."""
    if config.late == "off" or config.loss.type == "sft":
        return False
    return bool(stale_tokens(sequence, step, config.max_staleness, later_too=True).any())


def is_adapter_kept(earlier: int, step: int, config: TrainerConfig) -> bool:
    """Whether the adapter of the step `earlier` is kept beside that of `step`, to check the logprobs of its tokens: of
    the steps within `max_staleness`, and one more (`versions_kept`)."""
    return step - config.max_staleness - 1 <= earlier < step


def versions_kept(config: TrainerConfig) -> int:
    """Return how many of the newest versions training needs: the newest one, those before it whose tokens may still be
    trained, and one more while the next step is committed."""
    return config.max_staleness + 2
