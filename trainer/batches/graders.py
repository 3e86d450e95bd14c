"""How far the feedback of one API key may move a step (`feedback.max_share`).

The size of a step is the sum of the absolute advantages of what the loss averages over. What a key adds is the
difference between the step and the step without the key: each run that it graded has the reward that it would have
without that feedback (`Member.graders`), or is left out if it would have none, and baselines and spreads are computed
from what is left. A key is above the limit m if what it adds is larger than m / (1 - m) times the step without it:
it then decides more than the share m of a step that it graded runs of its own in. What such a key adds is made smaller
by one factor, to that bound.

Where several keys are above the limit, the step that bounds each of them is the one without all of them, and a run that
two of them graded is left out. So a limited key moves a step no further than its bound, whatever its signals say, and
signals of other keys count as if it had been silent. If nothing but keys above the limit gave rewards, nothing trains.

Hints have no reward to be made smaller. Those of one key teach at most the share m of a step's trained tokens: calls
are taught in the order of the batch, and the calls of a key that would exceed it are not taught.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.config import TrainerConfig
from pipeline.events import Member
from trainer.batches.groups import Example, TrainingGroup, examples, units

Vector = npt.NDArray[np.float64]
"""Advantage times weight of a sequence: [k] where its calls have advantages of their own, else [1]."""


def limit_graders(
    groups: Sequence[TrainingGroup], config: TrainerConfig, max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Return the examples of a batch within the limit, and the step's metrics: `grader_share`, what the largest key
    would add by its numbers or teach by its hints, as a share of the step with it, and `graders_limited`, the number of
    keys above the limit. No metrics where there is no limit, or nobody gave feedback."""
    whole = examples(groups, config)
    if max_share >= 1:
        return whole, {}
    whole, taught = _limit_hints(groups, whole, max_share)
    limited, added = _limit_numbers(groups, whole, config, max_share)
    shares = [*taught.values(), *added.values()]
    if not shares:
        return limited, {}
    above = {key for of_key in (taught, added) for key, share in of_key.items() if share > max_share}
    return limited, {"grader_share": max(shares), "graders_limited": float(len(above))}


def _limit_hints(
    groups: Sequence[TrainingGroup], whole: Sequence[Example], max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Leave out lessons from the hints of keys above the limit. Returns also the share of the trained tokens that each
    key's hints would have taught."""
    keys_of = _keys_of_hints(groups)
    allowed = max_share * sum(e.sequence.trained_tokens for e in whole)
    asked: Counter[str] = Counter()
    taught: Counter[str] = Counter()
    out = []
    for example in whole:
        lessons = []
        for lesson in example.lessons:
            keys = keys_of.get((example.sequence.trajectory, lesson.call), frozenset())
            tokens = Counter(dict.fromkeys(keys, len(lesson.slots)))
            asked += tokens
            if all((taught + tokens)[key] <= allowed for key in keys):
                taught += tokens
                lessons.append(lesson)
        out.append(dataclasses.replace(example, lessons=tuple(lessons)))
    total = sum(e.sequence.trained_tokens for e in whole)
    return out, {key: tokens / total for key, tokens in asked.items()}


def _keys_of_hints(groups: Sequence[TrainingGroup]) -> dict[tuple[str, int], frozenset[str]]:
    """The keys whose hints are in the teacher's prompt of a call, by run and call."""
    keys: dict[tuple[str, int], frozenset[str]] = {}
    for group in groups:
        for member in group.members:
            calls = group.hinted.get(member.trajectory, {})
            for hint in member.hints if calls else ():
                at = (member.trajectory, min(calls) if hint.call < 0 else hint.call)
                keys[at] = keys.get(at, frozenset()) | ({hint.by} - {""})
    return keys


def _limit_numbers(
    groups: Sequence[TrainingGroup], whole: Sequence[Example], config: TrainerConfig, max_share: float
) -> tuple[list[Example], dict[str, float]]:
    """Make smaller what the numbers of keys above the limit add. Returns also each key's share of the step. For a key
    that exceeds the limit only once other keys are left out, it is the share of the step without those keys."""
    keys = sorted({grader.key for g in groups for m in g.members for grader in m.graders})
    of_loss = [units(e.sequence, config) for e in whole]

    def size(vectors: list[Vector]) -> float:
        return sum(n * float(np.abs(v).mean()) for n, v in zip(of_loss, vectors, strict=True))

    def without(left_out: frozenset[str]) -> list[Vector]:
        made = {id(e.sequence): e for e in examples([_without(g, left_out) for g in groups], config)}
        return [_vector(made.get(id(e.sequence))) for e in whole]

    limited: frozenset[str] = frozenset()
    bound_of = max_share / (1 - max_share)
    shares: dict[str, float] = {}
    while True:
        rest = without(limited)
        above = set()
        for key in (k for k in keys if k not in limited):
            base = without(limited | {key})
            added, least = size(_minus(rest, base)), size(base)
            shares[key] = max(shares.get(key, 0.0), added / (added + least) if added else 0.0)
            if added > bound_of * least:
                above.add(key)
        if not above:
            break
        limited |= above
    if not limited:
        return list(whole), shares
    bound, step = bound_of * size(rest), rest
    for key in sorted(limited):
        part = _minus(without(limited - {key}), rest)
        factor = min(1.0, bound / size(part)) if size(part) else 0.0
        step = [s + factor * p for s, p in zip(step, part, strict=True)]
    return [_with(e, vector) for e, vector in zip(whole, step, strict=True)], shares


def _without(group: TrainingGroup, keys: frozenset[str]) -> TrainingGroup:
    """The group as it would be without the feedback of some keys."""
    members = [left for m in group.event.members if (left := _ungraded(m, keys)) is not None]
    names = {m.trajectory for m in members}
    return dataclasses.replace(
        group,
        event=msgspec.structs.replace(group.event, members=tuple(members)),
        sequences=[s for s in group.sequences or () if s.trajectory in names],
    )


def _ungraded(member: Member, keys: frozenset[str]) -> Member | None:
    """The member without the feedback of some keys; `None` if it has no reward then, or two of them graded it."""
    graders = [g for g in member.graders if g.key in keys]
    if not graders:
        return member
    if len(graders) > 1 or graders[0].reward is None:
        return None
    return msgspec.structs.replace(
        member, reward=graders[0].reward, call_rewards=graders[0].call_rewards, graders=()
    )


def _vector(example: Example | None) -> Vector:
    if example is None:
        return np.zeros(1)
    of_calls = example.call_advantages
    return example.weight * (np.array([example.advantage]) if of_calls is None else of_calls)


def _minus(left: list[Vector], right: list[Vector]) -> list[Vector]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _with(example: Example, vector: Vector) -> Example:
    """The example with this advantage times weight."""
    advantages = vector / example.weight
    own = None if example.call_advantages is None and len(vector) == 1 else advantages
    if own is not None and len(own) == 1:
        own = np.full(example.sequence.trained_tokens, own[0])
    return dataclasses.replace(example, advantage=float(advantages[0]), call_advantages=own)
