"""A cap on the share of a step that the feedback of one API key has (`feedback.max_share`).

A group with a run that a key graded is the key's; of a group of several keys each has an equal part. Under a cap,
groups are compared only with groups of the same keys: whatever a key says, the advantages of other groups stay as they
are. The size of a step is the sum of the absolute advantages of what the loss averages over. A key's part of it is
scaled down to the largest size that is at most the share `max_share` of the step with all parts scaled.

Hints have no reward to be scaled. Runs that a key gave hints on are taught at most the same share of a step's trained
tokens, in the order of the batch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import NamedTuple

from pipeline.config import TrainerConfig
from trainer.batches.examples import Example, loss_terms, make_examples, trajectory_weights
from trainer.batches.groups import GroupWithHistory

_ABOVE = 1 + 1e-9
"""A key is above the cap if its part is larger than the cap by this factor, which leaves room for rounding."""


class _Part(NamedTuple):
    """The part of a step that groups graded by the same keys make up."""

    keys: frozenset[str]
    examples: Sequence[Example]
    size: float
    """Sum of the absolute advantages of what the loss averages over."""


def cap_graders(
    groups: Sequence[GroupWithHistory], config: TrainerConfig, max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Return the examples of a batch within the cap, in the order of the groups, and the step's metrics:
    `grader_share`, the largest share that a key would have without the cap, and `graders_limited`, the number of keys
    above it. No metrics where there is no cap, or nobody gave feedback.

    With a cap of 0.2, a step of size 10 and a key that graded groups of size 6, the other keys' groups stay as they
    are, 4, and those of the key are scaled to size 1: 0.2 of the 5 that are left."""
    if max_share >= 1:
        return make_examples(groups, config), {}
    parts = _parts(groups, config)
    total, size_of_key = sum(part.size for part in parts), Counter[str]()
    for part in parts:
        size_of_key.update(dict.fromkeys(part.keys, part.size / max(len(part.keys), 1)))
    cap = _largest_size(size_of_key.values(), total, max_share)
    factor_of_key = {key: min(1.0, cap / size) if size else 1.0 for key, size in size_of_key.items()}
    scaled: dict[int, Example] = {}
    for part in parts:
        factor = fmean(factor_of_key[key] for key in part.keys) if part.keys else 1.0
        scaled |= {id(e.sequence): e.scaled(factor) for e in part.examples}
    examples, hint_shares = _cap_hints(groups, [scaled[id(s)] for g in groups for s in g.sequences], max_share)
    shares = [*hint_shares.values(), *(size / total if total else 0.0 for size in size_of_key.values())]
    if not shares:
        return examples, {}
    above = {key for key, size in size_of_key.items() if size > cap * _ABOVE}
    above |= {key for key, share in hint_shares.items() if share > max_share}
    return examples, {"grader_share": max(shares), "graders_limited": float(len(above))}


def _parts(groups: Sequence[GroupWithHistory], config: TrainerConfig) -> list[_Part]:
    """Return the parts of a batch, one for each set of keys that graded a group, in the same order in every process.
    The runs of a part are compared with each other only; trajectories have their weights of the whole batch."""
    keys_of = {g: frozenset(key for m in g.event.members for key in m.graded_by) for g in groups}
    weights = trajectory_weights(groups, config)
    parts = []
    for keys in dict.fromkeys(keys_of.values()):
        of_keys = make_examples([g for g in groups if keys_of[g] == keys], config)
        examples = [dataclasses.replace(e, weight=weights.get(e.sequence.trajectory, 1.0)) for e in of_keys]
        size = sum(loss_terms(e.sequence, config) * e.weight * e.size for e in examples)
        parts.append(_Part(keys, examples, size))
    return parts


def _largest_size(sizes: Collection[float], total: float, max_share: float) -> float:
    """Return the size to which larger parts are scaled down: a part of this size is at most `max_share` of the step
    after that. `sizes`: of the keys' parts; `total`: of the step; both before the scaling."""
    cap, rounding = max_share * total, 1e-9 * total
    for cut, size in enumerate(sorted(sizes, reverse=True), 1):
        if size <= cap * _ABOVE or cut * max_share >= 1:
            break
        total -= size
        cap = max_share * (total if total > rounding else 0.0) / (1 - cut * max_share)
    return cap


def _cap_hints(
    groups: Sequence[GroupWithHistory], examples: Sequence[Example], max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Return the examples, without the hinted calls that would raise a key's share of the trained tokens above
    `max_share`. Return also that share of each key without the cap. A key's tokens are those of hinted calls of the
    runs that it gave hints on."""
    keys_of = {m.trajectory: {hint.by for hint in m.hints} - {""} for g in groups for m in g.members}
    tokens = sum(e.sequence.trained_tokens for e in examples)
    hinted_tokens, taught_tokens = Counter[str](), Counter[str]()
    out = []
    for example in examples:
        count = sum(len(call.slots) for call in example.hinted_calls)
        count_of_key = dict.fromkeys(keys_of[example.sequence.trajectory], count)
        hinted_tokens.update(count_of_key)
        if all(taught_tokens[key] + n <= max_share * tokens for key, n in count_of_key.items()):
            taught_tokens.update(count_of_key)
            out.append(example)
        else:
            out.append(dataclasses.replace(example, hinted_calls=()))
    return out, {key: n / tokens for key, n in hinted_tokens.items() if n}
