"""Metrics of a step, over all its passes.

| metric | meaning |
| --- | --- |
| `loss` | TRL's loss of the whole batch; the mean over the step's updates |
| `ratio_*` | trainer's over sampler's probability per token, before the first update: mean, percentiles, largest |
| `kl_sampler` | KL of the sampler from the trainer, nats per token (k3 estimate) |
| `on_policy_logprob_diff`, `_max` | recorded against computed logprob, tokens of the present version: mean, largest |
| `clip_share` | share of tokens whose ratio exceeds the bound of the sampler correction |
| `staleness_mean`, `staleness_max` | steps between a token's sampling and its training; 0 if all are another branch's |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.engine.state import Logprobs
from trainer.sequences import OTHER_BRANCH, TokenSequence


def sampler_metrics(
    sequences: Sequence[TokenSequence], logprobs: Sequence[Logprobs], step: int, largest_ratio: float
) -> dict[str, float]:
    """Return the metrics of the module's table, without `loss`, as seen from `step`.

    `logprobs[i]` are those of `sequences[i]` by the policy before the first update; `largest_ratio` is the bound that
    `clip_share` counts by."""
    sampled = [s.logprobs[s.loss_mask] for s in sequences]
    raw = np.subtract(np.concatenate(list(logprobs)), np.concatenate(sampled), dtype=np.float32)
    differences = np.nan_to_num(raw.astype(np.float64))
    ratios = np.exp(differences)
    steps = np.concatenate([s.steps[s.loss_mask] for s in sequences])
    lags = step - steps
    own = lags[steps != OTHER_BRANCH] if (steps != OTHER_BRANCH).any() else np.zeros(1)
    # NaN of the sampler: no logprob was recorded. A NaN of the trainer stays in: it makes the mean NaN, and the step
    # is refused.
    compared = np.abs(raw[(lags == 0) & ~np.isnan(np.concatenate(sampled))])
    on_policy = (
        {"on_policy_logprob_diff": float(compared.mean()), "on_policy_logprob_diff_max": float(compared.max())}
        if len(compared)
        else {}
    )
    p5, p50, p95 = np.percentile(ratios, [5, 50, 95])
    return on_policy | {
        "ratio_mean": float(ratios.mean()),
        "ratio_p5": float(p5),
        "ratio_p50": float(p50),
        "ratio_p95": float(p95),
        "ratio_max": float(ratios.max()),
        "kl_sampler": float((ratios - 1 - differences).mean()),
        "clip_share": float((ratios > largest_ratio).mean()),
        "staleness_mean": float(own.mean()),
        "staleness_max": float(own.max()),
    }
