"""Checks of a step that need forward passes of their own, on a small sample of its tokens.

Tokens that the current version sampled need no such pass: the training pass computes their logprobs, and all of them
are compared with the recorded ones (`on_policy_logprob_diff`). Two measurements remain. Tokens of earlier versions are
computed again with the adapters of these versions, and compared with the recorded logprobs. The KL divergence from the
base model needs the base model's logprobs.

Both are made in one of `EVERY` steps. Each may then use half of `trainer.check_share` of the tokens that so many steps
compute, and at least one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.batches.examples import Example
from trainer.batches.packing import Packing, common_prefix, used_ids
from trainer.engine.passes import IndexedLogprobs, Passes
from trainer.engine.state import Logprobs, TrainState
from trainer.sequences import TokenSequence

_MOST_RATIO = 10.0
"""Limit on the ratio of a token's probabilities under base model and policy, in the estimate of the KL divergence."""

EVERY = 10
"""A wrong version, mask or base model is found within this number of steps, whichever version's tokens show it."""

Metrics = dict[str, float]


class Candidate(NamedTuple):
    """A sequence that may be in a check's sample. Only the tokens that the check compares are in its loss mask."""

    sequence: TokenSequence
    example: int
    """Index of its example in the step."""
    tree: tuple[int, int]
    """Sequences with an equal `tree` share prefixes: the group, and the version whose tokens are compared."""


@dataclass(frozen=True, eq=False)
class Step:
    """What a check needs of the step: the policy before it, and its batch."""

    state: TrainState
    examples: Sequence[Example]
    group_of: Sequence[int]
    """`group_of[i]` is the group of `examples[i]`."""
    logprobs: Sequence[Logprobs]
    """Of each example, by the policy before the step."""
    packing: Packing
    """The layout in which the batch was trained."""
    tokens: float
    """Number of tokens that the step's passes computed."""


def sample(
    candidates: Sequence[Candidate], limit: float, packing: Packing, rng: np.random.Generator
) -> list[Candidate]:
    """Draw candidates whose passes have at most `limit` tokens. Those of one prefix tree are drawn one after the other,
    so that they share their prefixes."""
    trees = list(dict.fromkeys(c.tree for c in candidates))
    rank = dict(zip(trees, rng.permutation(len(trees)).tolist(), strict=True))
    order = sorted(rng.permutation(len(candidates)).tolist(), key=lambda i: rank[candidates[i].tree])
    drawn: list[Candidate] = []
    for candidate in (candidates[i] for i in order):
        ids = used_ids(candidate.sequence)
        shared = 0
        if packing == "prefix" and drawn and drawn[-1].tree == candidate.tree:
            shared = common_prefix(ids, used_ids(drawn[-1].sequence))
        if len(ids) - shared <= limit:
            limit -= len(ids) - shared
            drawn.append(candidate)
    return drawn


def sample_due(candidates: Sequence[Candidate], step: Step, share: float) -> list[Candidate]:
    """Return the sample of a check; empty in steps in which the check is not made. `share`: the part of all computed
    tokens that the check may add. It is made once in `EVERY` steps, so a sample has this share of the tokens of so
    many steps."""
    # Steps 1, 11, 21 and so on: step 0 has nothing to compare. Where `EVERY` is 1, `1 % EVERY` is 0: every step.
    if not candidates or not share or step.state.step % EVERY != 1 % EVERY:
        return []
    rng = np.random.default_rng(step.state.step)
    shortest = min(candidates, key=lambda c: len(used_ids(c.sequence)))
    return sample(candidates, share * step.tokens * EVERY, step.packing, rng) or [shortest]


def _sample_logprobs(
    passes: Passes, drawn: Sequence[Candidate], step: Step, *, base: bool
) -> tuple[IndexedLogprobs, int]:
    """Return the logprobs of the sample `drawn`, by index, computed in the layout of training, and the number of tokens
    of their passes. With `base` they are those of the base model."""
    trees = list(dict.fromkeys(c.tree for c in drawn))
    examples = [Example(c.sequence, 0.0) for c in drawn]
    return passes.counted_logprobs(examples, [trees.index(c.tree) for c in drawn], step.packing, base=base)


def compare_earlier_versions(passes: Passes, step: Step, share: float) -> Metrics:
    """Compare recorded logprobs with logprobs recomputed at the versions that sampled, for tokens of versions before
    that of the step.

    Returns `sampler_logprob_diff` and `sampler_logprob_diff_max` (mean and maximum absolute difference in nats) and
    `sampler_logprob_checked` (number of tokens compared), and `tokens_checked` (tokens of the passes). Returns {} if
    the check is not due, or no token has both a recorded logprob and a version whose adapter is in the history. If the
    trainer computes NaN, the differences are NaN.

    A mean above about 1e-3 in float32 means that the tokens, the mask or the version are not those of the sampler."""
    candidates = [
        Candidate(part, index, (step.group_of[index], version))
        for index, example in enumerate(step.examples)
        for version in sorted(set(example.sequence.steps[example.sequence.loss_mask].tolist()))
        if version != step.state.step and version in step.state.history
        # Tokens of other versions, and tokens without a recorded logprob, stay in the sequence as context.
        if (part := _comparable(example.sequence, version)).loss_mask.any()
    ]
    drawn = sample_due(candidates, step, share)
    differences: list[Logprobs] = []
    tokens = 0
    for version in sorted({c.tree[1] for c in drawn}):
        of_version = [c for c in drawn if c.tree[1] == version]
        with passes.model.with_adapter(step.state.history[version]):
            computed, pass_tokens = _sample_logprobs(passes, of_version, step, base=False)
        tokens += pass_tokens
        for index, logprobs in computed.items():
            s = of_version[index].sequence
            differences.append(np.abs(logprobs - s.logprobs[s.loss_mask]))
    if not differences:
        return {}
    all_differences = np.concatenate(differences)
    return {
        "sampler_logprob_diff": float(all_differences.mean()),
        "sampler_logprob_diff_max": float(all_differences.max()),
        "sampler_logprob_checked": float(len(all_differences)),
        "tokens_checked": float(tokens),
    }


def _comparable(sequence: TokenSequence, version: int) -> TokenSequence:
    """Return the sequence with only those tokens to compare that the step `version` sampled with a recorded logprob.
    The others are context."""
    return sequence.masking_out((sequence.steps != version) | np.isnan(sequence.logprobs))


def kl_to_base(passes: Passes, step: Step, share: float) -> Metrics:
    """Return `kl`: the KL divergence of the policy before the step from the base model, estimated on a sample.

    In nats per token, by the k3 estimator (http://joschu.net/blog/kl-approx.html): the log ratio, and a term of mean 0
    that reduces its variance near the base model. The ratio in that term is at most `_MOST_RATIO`: far from the base
    model a single token raised an estimate from 1.4 to 40 nats. Returns also `tokens_checked`, the tokens of the
    passes. Returns {} if the check is not due, or if the loss has a KL term and computes the divergence anyway."""
    if passes.config.loss.beta:
        return {}
    candidates = [Candidate(e.sequence, i, (step.group_of[i], 0)) for i, e in enumerate(step.examples)]
    drawn = sample_due(candidates, step, share)
    if not drawn:
        return {}
    base, tokens = _sample_logprobs(passes, drawn, step, base=True)
    differences = np.concatenate([base[i] - step.logprobs[c.example] for i, c in enumerate(drawn)])
    return {"kl": kl_of(differences), "tokens_checked": float(tokens)}


def kl_of(differences: npt.NDArray[np.floating[Any]]) -> float:
    """Return the estimate that `kl_to_base` describes, in nats per token. `differences`: logprobs under the base less
    those under the policy, of tokens that the policy sampled."""
    ratios = np.exp(np.minimum(differences, np.log(_MOST_RATIO)))
    return float((ratios - 1 - differences).mean())
