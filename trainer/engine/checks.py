"""Diagnostics computed with extra forward passes: the mismatch with the sampler, and the KL to the base model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer.batches.groups import Example
from trainer.batches.packing import Packing, by_group, micro_batches
from trainer.engine.model import PolicyModel, shape_of
from trainer.engine.state import TrainState

_PER_GROUP = 4
"""At least this many sequences are taken per group, so that the shared prompt prefix is also packed once in the
check."""


def sample_indices(groups: Sequence[int], count: int) -> list[int]:
    """Return the indices of about `count` sequences, spread over the groups of the batch, several per group.

    `groups[i]` is the group of sequence i. Returns at most `count` indices, and all of a small batch."""
    if not count:
        return []
    members = by_group(groups)
    per_group = min(count, max(_PER_GROUP, -(-count // len(members))))
    stride = max(1, len(members) * per_group // count)
    return [index for inside in members[::stride] for index in inside[:per_group]][:count]


def sampler_logprob_difference(
    model: PolicyModel,
    state: TrainState,
    examples: Sequence[Example],
    groups: Sequence[int],
    packing: Packing,
    budget: int,
) -> dict[str, float]:
    """Compare the sampler's recorded logprobs with logprobs recomputed by the trainer, for some sequences of a batch.

    Each token's logprob is recomputed with the adapter of the policy version that sampled it, packed as in training, in
    passes of at most `budget` tokens. `groups[i]` is the group of `examples[i]`.

    Returns `sampler_logprob_diff` and `sampler_logprob_diff_max` (mean and maximum absolute difference in nats) and
    `sampler_logprob_checked` (number of tokens compared). Returns {} if no token has both a recorded logprob and a
    version whose adapter is still in the history. If the trainer computes NaN, the differences are NaN.

    A mean above about 1e-3 in float32 means that the tokens, the mask or the version are not those of the sampler."""
    chosen = [(examples[i].sequence, groups[i]) for i in sample_indices(groups, model.config.check_sequences)]
    diffs: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    # `TokenSequence.steps` holds, for each token, the step of the policy version that sampled it.
    for version in sorted({int(step) for s, _ in chosen for step in np.unique(s.steps[s.loss_mask])}):
        adapter_weights = state.history.get(version)
        if adapter_weights is None:
            continue
        # Tokens of other versions stay in the sequence as context; only those of this version are compared.
        at_version = [(s.masking_out(s.steps != version), group) for s, group in chosen]
        at_version = [(s, group) for s, group in at_version if s.loss_mask.any()]
        sequences = [s for s, _ in at_version]
        batches = micro_batches(sequences, [group for _, group in at_version], budget, packing)
        with model.with_adapter(adapter_weights):
            # S: sequences in the pass; K: the largest number of trained tokens in one of them.
            for batch, logprobs_SK in model.logprobs_of(batches, sequences):
                computed = logprobs_SK.cpu().numpy()
                for row, i in enumerate(batch.indices):
                    s = sequences[i]
                    recorded = s.logprobs[s.loss_mask]
                    # NaN: the sampler recorded no logprob. A NaN that the trainer computed is kept, so the check fails.
                    has_logprob = ~np.isnan(recorded)
                    diffs.append(np.abs(computed[row, : s.trained_tokens] - recorded)[has_logprob])
    compared = np.concatenate(diffs) if diffs else np.zeros(0, np.float32)
    if not len(compared):
        return {}
    return {
        "sampler_logprob_diff": float(compared.mean()),
        "sampler_logprob_diff_max": float(compared.max()),
        "sampler_logprob_checked": float(len(compared)),
    }


def kl_to_base(
    model: PolicyModel, examples: Sequence[Example], groups: Sequence[int], packing: Packing, budget: int
) -> dict[str, float]:
    """Return `kl`: the KL divergence of the current policy from the base model, estimated on some sequences of a batch.

    In nats per token, by the k3 estimator. For losses without a KL term; a loss with one computes it anyway. Returns {}
    if no sequence is chosen. `groups[i]` is the group of `examples[i]`; a pass has at most `budget` tokens."""
    chosen = sample_indices(groups, model.config.check_sequences)
    sequences = [examples[i].sequence for i in chosen]
    if not sequences:
        return {}
    kl = 0.0
    batches = micro_batches(sequences, [groups[i] for i in chosen], budget, packing)
    for batch, logprobs_SK in model.logprobs_of(batches, sequences):
        shape = shape_of([sequences[i] for i in batch.indices])
        with torch.no_grad(), model.model.disable_adapter():
            base_SK, _ = model.logprobs(batch.layout, shape, entropy=False)
        difference = base_SK - logprobs_SK  # padding is 0 in both, so it adds nothing to the sum
        kl += float((torch.exp(difference) - difference - 1).sum())
    return {"kl": kl / sum(s.trained_tokens for s in sequences)}
