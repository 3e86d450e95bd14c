"""What a step finds out beside its loss, with forward passes over some of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.groups import Example
from trainer.packing import padded
from trainer.sequences import TokenSequence

if TYPE_CHECKING:
    from trainer.engine import Engine, Line


def picked(examples: Sequence[Example], wanted: int) -> list[TokenSequence]:
    """`wanted` sequences from all over the batch."""
    stride = max(1, len(examples) // wanted) if wanted else 0
    return [e.sequence for e in examples[::stride]][:wanted] if wanted else []


def sampler_difference(engine: Engine, line: Line, examples: Sequence[Example]) -> dict[str, float]:
    """Mean absolute difference of recorded and recomputed logprobs, each recomputed at the version that sampled.

    A value above about 1e-3 in float32 means that the tokens, the mask or the version are not what was sampled."""
    chosen = picked(examples, engine.config.check_sequences)
    differences: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for version in sorted({int(s) for p in chosen for s in np.unique(p.steps[p.trained])}):
        weights = line.history.get(version)
        if weights is None:
            continue
        at = [s.without(s.steps != version) for s in chosen]
        at = [s for s in at if s.trained.any()]
        shape = (len(at), max(s.trained_tokens for s in at))
        with engine.having(weights), torch.no_grad():
            logprobs, _ = engine.logprobs(padded(at), shape, entropy=False)
        computed = logprobs.cpu().numpy()
        differences += [
            np.abs(computed[row, : s.trained_tokens] - s.logprobs[s.trained]) for row, s in enumerate(at)
        ]
    known = np.concatenate(differences) if differences else np.zeros(0, np.float32)
    known = known[np.isfinite(known)]
    if not len(known):
        return {}
    return {
        "sampler_logprob_diff": float(known.mean()),
        "sampler_logprob_diff_max": float(known.max()),
        "sampler_logprob_checked": float(len(known)),
    }


def kl_to_base(engine: Engine, examples: Sequence[Example]) -> dict[str, float]:
    """KL of the live policy from the base model, nats per token (k3 estimate), over some sequences: where the loss has no
    KL term, nothing else needs the base model's logprobs."""
    chosen = picked(examples, engine.config.check_sequences)
    if not chosen:
        return {}
    layout, shape = padded(chosen), (len(chosen), max(s.trained_tokens for s in chosen))
    with torch.no_grad():
        logprobs, _ = engine.logprobs(layout, shape, entropy=False)
        with engine.model.disable_adapter():
            base, _ = engine.logprobs(layout, shape, entropy=False)
    difference = base - logprobs  # 0 beyond a sequence's end, where both are
    kl = (torch.exp(difference) - difference - 1).sum() / sum(s.trained_tokens for s in chosen)
    return {"kl": float(kl)}
