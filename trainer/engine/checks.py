"""Checks of a step by forward passes over some of its sequences: difference to the sampler, KL to the base model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer.batches.groups import Example
from trainer.batches.packing import Packing, micro_batches
from trainer.engine.model import PolicyModel, shape_of
from trainer.engine.state import TrainState

_PER_GROUP = 4
"""Sequences checked per group if there are many groups. Their shared prefix is computed once in the check too."""


def picked(groups: Sequence[int], wanted: int) -> list[int]:
    """Indices of about `wanted` sequences: several from each of some groups spread over the batch."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    if not wanted:
        return []
    each = min(wanted, max(_PER_GROUP, -(-wanted // len(members))))
    stride = max(1, len(members) * each // wanted)
    chosen = [index for group in list(members)[::stride] for index in members[group][:each]]
    return chosen[:wanted]


def sampler_difference(
    model: PolicyModel,
    state: TrainState,
    examples: Sequence[Example],
    groups: Sequence[int],
    packing: Packing,
    budget: int,
) -> dict[str, float]:
    """Mean absolute difference of recorded and recomputed logprobs of some sequences, each recomputed at the version
    that sampled and in the layout that is trained, in passes of at most `budget` tokens. Empty where no logprob can
    be compared.

    A value above about 1e-3 in float32 means that the tokens, the mask or the version are not what was sampled."""
    chosen = [(examples[i].sequence, groups[i]) for i in picked(groups, model.config.check_sequences)]
    differences: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for version in sorted({int(v) for s, _ in chosen for v in np.unique(s.steps[s.loss_mask])}):
        weights = state.history.get(version)
        if weights is None:
            continue
        at = [(s.without(s.steps != version), group) for s, group in chosen]
        sequences = [s for s, _ in at if s.loss_mask.any()]
        batches = micro_batches(sequences, [group for s, group in at if s.loss_mask.any()], budget, packing)
        with model.with_adapter(weights):
            for batch, logprobs_SK in model.logprobs_of(batches, sequences):
                computed = logprobs_SK.cpu().numpy()
                for row, i in enumerate(batch.indices):
                    s = sequences[i]
                    differences.append(np.abs(computed[row, : s.trained_tokens] - s.logprobs[s.loss_mask]))
    known = np.concatenate(differences) if differences else np.zeros(0, np.float32)
    known = known[~np.isnan(known)]  # the sampler gave no logprob
    if not len(known):
        return {}
    return {
        "sampler_logprob_diff": float(known.mean()),
        "sampler_logprob_diff_max": float(known.max()),
        "sampler_logprob_checked": float(len(known)),
    }


def kl_to_base(
    model: PolicyModel, examples: Sequence[Example], groups: Sequence[int], packing: Packing, budget: int
) -> dict[str, float]:
    """KL of the live policy from the base model over some sequences, in nats per token (k3 estimate): for losses
    without a KL term, which do not compute the base model's logprobs."""
    chosen = picked(groups, model.config.check_sequences)
    sequences = [examples[i].sequence for i in chosen]
    if not sequences:
        return {}
    kl = 0.0
    batches = micro_batches(sequences, [groups[i] for i in chosen], budget, packing)
    for batch, logprobs_SK in model.logprobs_of(batches, sequences):
        shape = shape_of([sequences[i] for i in batch.indices])
        with torch.no_grad(), model.model.disable_adapter():
            base_SK, _ = model.logprobs(batch.layout, shape, entropy=False)
        difference = base_SK - logprobs_SK  # both are 0 beyond a sequence's end
        kl += float((torch.exp(difference) - difference - 1).sum())
    return {"kl": kl / sum(s.trained_tokens for s in sequences)}
