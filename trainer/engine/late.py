"""Runs that are trained although they are older than `trainer.max_staleness` (`trainer.late`).

A late sequence is one with a trained token that was sampled more than `max_staleness` steps ago, or by a later version,
as a replay's may be. In place of the loss's correction it has the truncated ratio of the whole sequence, which stays
unbiased but for its truncation however far the policies are apart. How much the late sequences of a step can teach is
their effective sample size by Kish, `(sum w)^2 / sum w^2` of their weights w: n where all weigh the same, towards 1
where a few weigh all. Below `trainer.late_min_ess` of their number, none of the step's late tokens is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.config import TrainerConfig
from trainer.engine.state import Logprobs, UntrainableError
from trainer.sequences import TokenSequence


class LateRunsError(UntrainableError):
    """The step's late runs are too far from the policy to be trained; nothing was changed."""


def is_late(sequence: TokenSequence, step: int, config: TrainerConfig) -> bool:
    """Whether a sequence is late at `step` and the settings train it with its own correction."""
    if config.late == "off" or config.loss.type == "sft":
        return False
    lags = step - sequence.steps[sequence.loss_mask].astype(np.int64)
    return bool(((lags > config.max_staleness) | (lags < 0)).any())


def late_metrics(
    sequences: Sequence[TokenSequence], logprobs: Sequence[Logprobs], config: TrainerConfig
) -> dict[str, float]:
    """Return `late_sequences` and `late_ess`, from the logprobs of the sequences' trained tokens by the policy before
    the step. Raises `LateRunsError` where the effective sample size is below the bound."""
    ratios = [
        np.nan_to_num(np.subtract(mine, s.logprobs[s.loss_mask], dtype=np.float64), nan=0.0).sum()
        for s, mine in zip(sequences, logprobs, strict=True)
    ]
    weights = np.minimum(np.exp(np.minimum(ratios, 700.0)), config.loss.importance_clip)
    squares = float((weights**2).sum())
    size = float(weights.sum()) ** 2 / squares if squares else 0.0
    if size < config.late_min_ess * len(sequences):
        raise LateRunsError(
            f"the effective sample size of {len(sequences)} late sequences is {size:.3g}, below trainer.late_min_ess "
            f"= {config.late_min_ess:g} of their number"
        )
    return {"late_sequences": float(len(sequences)), "late_ess": size}
