"""What a step measures of itself, over all its micro-batches.

| metric | meaning |
| --- | --- |
| `loss` | TRL's loss of the whole batch |
| `ratio_*` | importance ratio, trainer over sampler probability per token: mean, percentiles, largest |
| `ratio_sequence_max` | the largest ratio of a whole sequence, the product of its tokens' |
| `kl_sampler` | KL of the sampler from the trainer, nats per token (k3 estimate) |
| `on_policy_logprob_diff`, `_max` | absolute difference of recorded and computed logprobs of the tokens that the present version sampled: mean, largest |
| `clip_share` | share of tokens whose ratio exceeds `trainer.loss.importance_clip` |
| `staleness_mean`, `staleness_max` | steps between a token's sampling and its training |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from trainer.batches.sequences import TokenSequence


class Measured:
    """What is gathered over the micro-batches of a step."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.differences: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        """Trainer's logprob minus the recorded one of every token; NaN where none was recorded."""
        self.ratios: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self.steps: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        self.cut = 0
        self.kl = 0.0
        self.longest = 0.0

    @classmethod
    def of(cls, parts: Iterable[Measured]) -> Measured:
        """What several processes gathered of one step."""
        out = cls()
        for part in parts:
            out.loss += part.loss
            out.longest = max(out.longest, part.longest)
            out.differences += part.differences
            out.ratios += part.ratios
            out.steps += part.steps
            out.cut += part.cut
            out.kl += part.kl
        return out

    def add(
        self, loss: torch.Tensor, logprobs_SK: torch.Tensor, inside: Sequence[TokenSequence], maximum: float
    ) -> None:
        self.loss += float(loss.detach())
        computed = logprobs_SK.detach().cpu().numpy()
        for row, s in enumerate(inside):
            difference = computed[row, : s.trained_tokens] - s.logprobs[s.loss_mask]
            self.differences.append(difference.astype(np.float32))
            difference = np.nan_to_num(difference)
            ratio = np.exp(difference)
            self.kl += float((ratio - 1 - difference).sum())
            self.longest = max(self.longest, float(difference.sum()))
            self.ratios.append(ratio.astype(np.float32))
            self.steps.append(s.steps[s.loss_mask])
            self.cut += int((ratio > maximum).sum())

    def summary(self, step: int) -> dict[str, float]:
        ratios = np.concatenate(self.ratios)
        lags = step - np.concatenate(self.steps)
        apart = np.abs(np.concatenate(self.differences)[lags == 0])
        apart = apart[~np.isnan(apart)]
        on_policy = {
            "on_policy_logprob_diff": float(apart.mean()), "on_policy_logprob_diff_max": float(apart.max())
        } if len(apart) else {}  # fmt: skip
        p5, p50, p95 = np.percentile(ratios, [5, 50, 95])
        return on_policy | {
            "loss": self.loss,
            "ratio_mean": float(ratios.mean()),
            "ratio_p5": float(p5),
            "ratio_p50": float(p50),
            "ratio_p95": float(p95),
            "ratio_max": float(ratios.max()),
            "ratio_sequence_max": float(np.exp(min(self.longest, 700.0))),
            "kl_sampler": self.kl / len(ratios),
            "clip_share": self.cut / len(ratios),
            "staleness_mean": float(lags.mean()),
            "staleness_max": float(lags.max()),
        }
