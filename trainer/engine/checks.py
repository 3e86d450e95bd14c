"""What a step finds out beside its loss, with forward passes over some of its sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.batches.groups import Example
from trainer.batches.packing import MicroBatch, Packing, micro_batches
from trainer.batches.sequences import TokenSequence
from trainer.engine.fitting import within_memory

if TYPE_CHECKING:
    from trainer.engine.engine import Engine
    from trainer.engine.state import TrainState


_OF_A_GROUP = 4
"""Sequences that are checked of one group where there are many groups: what they share is shared in the check too."""


def picked(groups: Sequence[int], wanted: int) -> list[int]:
    """Places of about `wanted` sequences from groups all over the batch, several of each group."""
    members: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    if not wanted:
        return []
    each = min(wanted, max(_OF_A_GROUP, -(-wanted // len(members))))
    stride = max(1, len(members) * each // wanted)
    chosen = [place for group in list(members)[::stride] for place in members[group][:each]]
    return chosen[:wanted]


def _logprobs(
    engine: Engine, sequences: Sequence[TokenSequence], groups: Sequence[int], packing: Packing
) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
    """The passes of some sequences, laid out as a step lays them out, with their logprobs [S, K]; without gradients."""
    for batch in micro_batches(sequences, groups, engine.budget.tokens, packing):
        shape = (len(batch.indices), max(sequences[i].trained_tokens for i in batch.indices))
        with torch.no_grad(), within_memory(batch):
            computed = engine.logprobs(batch.layout, shape, entropy=False)[0]
        yield batch, computed


def sampler_difference(
    engine: Engine, state: TrainState, examples: Sequence[Example], groups: Sequence[int], packing: Packing
) -> dict[str, float]:
    """Mean absolute difference of recorded and recomputed logprobs of some sequences, each recomputed at the version that sampled
    and in the layout that is trained.

    A value above about 1e-3 in float32 means that the tokens, the mask or the version are not what was sampled."""
    chosen = [(examples[i].sequence, groups[i]) for i in picked(groups, engine.config.check_sequences)]
    differences: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for version in sorted({int(v) for s, _ in chosen for v in np.unique(s.steps[s.loss_mask])}):
        weights = state.history.get(version)
        if weights is None:
            continue
        at = [(s.without(s.steps != version), group) for s, group in chosen]
        sequences = [s for s, _ in at if s.loss_mask.any()]
        inside = [group for s, group in at if s.loss_mask.any()]
        with engine.with_adapter(weights):
            for batch, logprobs in _logprobs(engine, sequences, inside, packing):
                computed = logprobs.cpu().numpy()
                for row, i in enumerate(batch.indices):
                    s = sequences[i]
                    differences.append(np.abs(computed[row, : s.trained_tokens] - s.logprobs[s.loss_mask]))
    known = np.concatenate(differences) if differences else np.zeros(0, np.float32)
    known = known[~np.isnan(known)]  # unknown to the sampler
    if not len(known):
        return {}
    return {
        "sampler_logprob_diff": float(known.mean()),
        "sampler_logprob_diff_max": float(known.max()),
        "sampler_logprob_checked": float(len(known)),
    }


def kl_to_base(
    engine: Engine, examples: Sequence[Example], groups: Sequence[int], packing: Packing
) -> dict[str, float]:
    """KL of the live policy from the base model, nats per token (k3 estimate), over some sequences: where the loss has no
    KL term, nothing else needs the base model's logprobs."""
    places = picked(groups, engine.config.check_sequences)
    sequences, inside = [examples[i].sequence for i in places], [groups[i] for i in places]
    if not sequences:
        return {}
    kl = 0.0
    for batch, logprobs in _logprobs(engine, sequences, inside, packing):
        shape = (logprobs.shape[0], logprobs.shape[1])
        with torch.no_grad(), engine.model.disable_adapter():
            base, _ = engine.logprobs(batch.layout, shape, entropy=False)
        difference = base - logprobs  # 0 beyond a sequence's end, where both are
        kl += float((torch.exp(difference) - difference - 1).sum())
    return {"kl": kl / sum(s.trained_tokens for s in sequences)}
