"""How much of a step the feedback of one API key may decide (`feedback.max_share`).

What a key decides of a step is the sum of the absolute advantages of the trained tokens, each times the share of the
run's reward that came from the key (`Member.graders`), as a share of the sum over all tokens. Above the limit, the part
of these advantages that the key decided is made smaller by one factor, so that its share of what is left is the limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.batches.groups import Example, TrainingGroup


def limit_graders(
    groups: Sequence[TrainingGroup], examples: Sequence[Example], max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Return the examples of a batch within the limit, and the step's metrics: `grader_share`, the largest share of a
    key before the limit, and `graders_limited`, the number of keys above it. No metrics where nobody gave feedback."""
    graders: dict[str, Mapping[str, float]] = {m.trajectory: m.graders for g in groups for m in g.members}
    names = sorted({name for of_run in graders.values() for name in of_run})
    limited, largest = 0, 0.0
    out = list(examples)
    for name in names:
        parts = np.array([graders[e.sequence.trajectory].get(name, 0.0) for e in out])
        sizes = np.array([_size(e) for e in out])
        total, decided = float(sizes.sum()), float((sizes * parts).sum())
        share = decided / total if total else 0.0
        largest = max(largest, share)
        if share > max_share:
            limited += 1
            factor = max_share * (total - decided) / ((1 - max_share) * decided)
            out = [_scaled(e, 1 - part * (1 - factor)) for e, part in zip(out, parts, strict=True)]
    metrics = {"grader_share": largest, "graders_limited": float(limited)} if names else {}
    return out, metrics


def _size(example: Example) -> float:
    """The sum of the absolute advantages of an example's trained tokens."""
    if example.call_advantages is not None:
        return float(np.abs(example.call_advantages).sum()) * example.weight
    return abs(example.advantage) * example.sequence.trained_tokens * example.weight


def _scaled(example: Example, factor: float) -> Example:
    of_calls = example.call_advantages
    return dataclasses.replace(
        example,
        advantage=example.advantage * factor,
        call_advantages=None if of_calls is None else of_calls * factor,
    )
