"""Runs that are trained although they are older than `trainer.max_staleness` (`trainer.late`).

`trainer.staleness.is_late` says which sequences are late. In place of the loss's correction a late sequence has the
truncated ratio of the whole sequence, which stays unbiased but for its truncation however far the policies are apart.
How much the late sequences of a step can teach is their effective sample size by Kish, `(sum w)^2 / sum w^2` of their
weights w: n where all weigh the same, towards 1 where a few weigh all. Below `trainer.late_min_ess` of their number,
none of the step's late tokens is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.config import TrainerConfig
from trainer.engine.state import Logprobs, UntrainableError
from trainer.sequences import TokenSequence


class LateRunsError(UntrainableError):
    """The step's late runs are too far from the policy to be trained; nothing was changed."""


def late_metrics(
    sequences: Sequence[TokenSequence], logprobs: Sequence[Logprobs], config: TrainerConfig
) -> dict[str, float]:
    """Return the metrics `late_sequences`, the number of late sequences, and `late_ess`, their effective sample size.
    `logprobs[i]`: of the trained tokens of `sequences[i]` by the policy before the step. Raises `LateRunsError` where
    the effective sample size is below `trainer.late_min_ess` of the number."""
    log_ratios = [
        np.nan_to_num(np.subtract(by_policy, s.logprobs[s.loss_mask], dtype=np.float64), nan=0.0).sum()
        for s, by_policy in zip(sequences, logprobs, strict=True)
    ]
    # Beyond 709, `exp` overflows.
    weights = np.minimum(np.exp(np.minimum(log_ratios, 700.0)), config.loss.importance_clip)
    squares = float((weights**2).sum())
    size = float(weights.sum()) ** 2 / squares if squares else 0.0
    if size < config.late_min_ess * len(sequences):
        raise LateRunsError(
            f"the effective sample size of {len(sequences)} late sequences is {size:.3g}, below trainer.late_min_ess "
            f"= {config.late_min_ess:g} of their number"
        )
    return {"late_sequences": float(len(sequences)), "late_ess": size}
