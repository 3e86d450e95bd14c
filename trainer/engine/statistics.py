"""Metrics of a step, over all its passes.

| metric | meaning |
| --- | --- |
| `loss` | TRL's loss of the whole batch; the mean over the step's updates |
| `ratio_*` | trainer's over sampler's probability per token, before the first update: mean, percentiles, largest |
| `ratio_sequence_max` | the largest ratio of a whole sequence, the product of its tokens' |
| `kl_sampler` | KL of the sampler from the trainer, nats per token (k3 estimate) |
| `on_policy_logprob_diff`, `_max` | recorded against computed logprob, tokens of the present version: mean, largest |
| `clip_share` | share of tokens whose ratio exceeds the bound of the sampler correction |
| `staleness_mean`, `staleness_max` | steps between a token's sampling and its training |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.batches.sequences import TokenSequence


class BatchStatistics:
    """Gathered pass by pass; `summary` gives the metrics."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.differences: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        """Trainer's logprob minus the sampler's for every token; NaN where either is missing or NaN."""
        self.recorded: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
        """Whether the sampler gave a logprob for every token."""
        self.steps: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        """The policy step that sampled every token."""

    @classmethod
    def merged(cls, parts: Iterable[BatchStatistics]) -> BatchStatistics:
        """Add up the statistics of several processes or updates."""
        out = cls()
        for part in parts:
            out.loss += part.loss
            out.differences += part.differences
            out.recorded += part.recorded
            out.steps += part.steps
        return out

    def add(self, sequence: TokenSequence, logprobs_k: np.ndarray[Any, Any]) -> None:
        """Count the trained tokens of `sequence`, whose logprobs by the trainer are `logprobs_k`, in nats."""
        sampled = sequence.logprobs[sequence.loss_mask]
        self.differences.append((logprobs_k - sampled).astype(np.float32))
        self.recorded.append(~np.isnan(sampled))
        self.steps.append(sequence.steps[sequence.loss_mask])

    def summary(self, step: int, largest_ratio: float) -> dict[str, float]:
        """The metrics of the module's table as seen from `step`; `largest_ratio` is the bound that `clip_share`
        counts by."""
        raw = np.concatenate(self.differences)
        differences = np.nan_to_num(raw.astype(np.float64))
        ratios = np.exp(differences)
        lags = step - np.concatenate(self.steps)
        # A NaN of the trainer stays in: it makes the mean NaN, and the step is refused.
        apart = np.abs(raw[(lags == 0) & np.concatenate(self.recorded)])
        on_policy = {
            "on_policy_logprob_diff": float(apart.mean()), "on_policy_logprob_diff_max": float(apart.max())
        } if len(apart) else {}  # fmt: skip
        p5, p50, p95 = np.percentile(ratios, [5, 50, 95])
        longest = max(float(np.nan_to_num(d.astype(np.float64)).sum()) for d in self.differences)
        return on_policy | {
            "loss": self.loss,
            "ratio_mean": float(ratios.mean()),
            "ratio_p5": float(p5),
            "ratio_p50": float(p50),
            "ratio_p95": float(p95),
            "ratio_max": float(ratios.max()),
            "ratio_sequence_max": float(np.exp(min(longest, 700.0))),
            "kl_sampler": float((ratios - 1 - differences).mean()),
            "clip_share": float((ratios > largest_ratio).mean()),
            "staleness_mean": float(lags.mean()),
            "staleness_max": float(lags.max()),
        }
