"""From the groups of a batch to sequences with advantages: `trainer.batches.graders` calls `make_examples` for a step.

An advantage is a return less its baseline, the mean of those that it is compared with (`trainer.loss.baseline`: of the
group, of the task's earlier runs or of the batch), scaled (`advantage_scaling`) and perhaps normalised. Baseline and
spread come from the scored members of the training split only (`trainer.batches.groups`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config import LossConfig, TrainerConfig
from pipeline.events import Member
from trainer.batches.groups import GroupWithHistory
from trainer.batches.returns import (
    NO_ROLES,
    Floats,
    Roles,
    RunReturns,
    by_token,
    calls_with_credit,
    group_returns,
    has_call_returns,
    mean_returns,
    role_baselines,
)
from trainer.batches.tasks import task_baselines
from trainer.distillation.teacher import HintedCall, TeacherLogprobs
from trainer.sequences import TokenSequence

_STD_FLOOR = 1e-4
"""Added to a standard deviation that advantages are divided by, as TRL does."""


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence with the advantage of its trajectory, or of the calls in it."""

    sequence: TokenSequence
    advantage: float
    call_advantages: npt.NDArray[np.float64] | None = None
    """The advantage of the call that sampled each trained token, [k], in place of `advantage`. `None`: all tokens have
    `advantage`."""
    weight: float = 1.0
    """Factor on the advantage that evens out long and short trajectories (`trainer.loss.weighting`)."""
    old_logprobs: np.ndarray[Any, np.dtype[np.floating[Any]]] | None = None
    """Logprobs of the trained tokens, [k] in nats, by the policy before the first of several updates of a step.
    `None` where a step takes one update."""
    kl_penalty: np.ndarray[Any, np.dtype[np.floating[Any]]] | None = None
    """What `trainer.loss.kl_penalty` adds to the advantage of each trained token, [k]."""
    hinted_calls: tuple[HintedCall, ...] = ()
    """The calls of the sequence whose logprobs the step computes with the teacher."""
    teacher: TeacherLogprobs | None = None
    """A teacher's logprobs of the trained tokens."""
    late: bool = False
    """Whether the sequence gets the correction of late sequences (`trainer.staleness.is_late`)."""

    @property
    def size(self) -> float:
        """The mean absolute advantage of the trained tokens."""
        return float(np.abs(self.advantage if self.call_advantages is None else self.call_advantages).mean())

    def scaled(self, factor: float) -> Example:
        """Return the example with its advantages times `factor`."""
        of_calls = None if self.call_advantages is None else self.call_advantages * factor
        return dataclasses.replace(self, advantage=self.advantage * factor, call_advantages=of_calls)


def make_examples(groups: Sequence[GroupWithHistory], config: TrainerConfig) -> list[Example]:
    """Return every sequence of the batch with its advantage, in the order of the groups.

    A run has one return, its reward, or where rewards belong to calls a return for each call
    (`trainer.batches.returns`). With loss type `sft` the advantage is the run's reward."""
    weights = trajectory_weights(groups, config)
    if config.loss.type == "sft":
        return _supervised_examples(groups, weights)
    loss = config.loss
    has_returns_of_calls = {g: has_call_returns(g.members, loss.turn_discount) for g in groups}
    if "batch" in (loss.baseline, loss.advantage_scaling):  # all runs are compared, so all need returns of calls
        has_returns_of_calls = dict.fromkeys(groups, any(has_returns_of_calls.values()))
    returns = {
        g: group_returns(
            g.members,
            g.sequences,
            loss.turn_discount,
            by_call=has_returns_of_calls[g],
            # Earlier runs of a task are compared whichever agents made their calls: their events do not say.
            roles={} if loss.baseline == "task" else g.history.roles,
        )
        for g in groups
    }
    batch_std = _std([run for of_group in returns.values() for run in of_group])
    baselines = _baselines(groups, loss.baseline, returns)
    out = []
    for group in groups:
        match loss.advantage_scaling:
            case "group":
                divisor = _std(returns[group]) + _STD_FLOOR
            case "batch":
                divisor = batch_std + _STD_FLOOR
            case "none":
                divisor = 1.0
        advantage_of = {
            member.trajectory: _advantages(
                member, (run.values - mean) / divisor, loss, group.history.roles.get(member.trajectory, NO_ROLES)
            )
            for member, run, mean in zip(group.members, returns[group], baselines[group], strict=True)
        }
        out += [
            Example(
                s,
                # The advantage of the first call. Where calls differ, the loss reads `call_advantages`.
                float(advantage_of[s.trajectory][0]),
                by_token(advantage_of[s.trajectory], s),
                weight=weights.get(s.trajectory, 1.0),
                hinted_calls=group.history.hinted_calls(s),
                teacher=group.history.teacher_logprobs(s),
            )
            for s in group.sequences
        ]
    return out if loss.advantage_normalization == "none" else _normalized(out, config)


def _supervised_examples(groups: Sequence[GroupWithHistory], weights: Mapping[str, float]) -> list[Example]:
    """Return each sequence with its run's reward as the advantage."""
    out = []
    for group in groups:
        # By group: a trajectory may be in several, with the rewards of other verdict sets.
        reward_of = {m.trajectory: m.reward for m in group.members}
        out += [Example(s, reward_of[s.trajectory], weight=weights.get(s.trajectory, 1.0)) for s in group.sequences]
    return out


def _baselines(
    groups: Sequence[GroupWithHistory],
    kind: Literal["group", "task", "batch"],
    returns: Mapping[GroupWithHistory, list[RunReturns]],
) -> dict[GroupWithHistory, list[Floats]]:
    """Return the baselines of a batch: for each group, one array for each member, with a baseline for each return of
    the member. `kind`: what a return is compared with."""
    batch = [run for of_group in returns.values() for run in of_group]
    if kind == "task":
        values = [run.values for run in batch]
        batch_means = mean_returns(values, max(map(len, values), default=0))
        return {g: task_baselines([run.values for run in returns[g]], g.admitted.earlier, batch_means) for g in groups}
    of_batch = role_baselines(batch) if kind == "batch" else None
    out = {}
    for group in groups:
        by_role = of_batch or role_baselines(returns[group])
        out[group] = [np.array([by_role[role][position] for role, position in r.positions]) for r in returns[group]]
    return out


def _advantages(member: Member, differences: Floats, loss: LossConfig, roles: Roles) -> Floats:
    """Return the advantage of each call of a run, from the scaled differences of its returns to the baseline.

    Where only calls were judged (`Member.graded`), the calls that nothing judged have 0 (`calls_with_credit`). A last
    number, 0, is added for all later calls, which a teacher may teach."""
    if member.graded == "calls":
        return np.append(differences * calls_with_credit(member, len(differences), loss.turn_discount, roles), 0.0)
    return differences


def _normalized(examples: list[Example], config: TrainerConfig) -> list[Example]:
    """Return the examples with their advantages scaled so that the mean absolute advantage is 1, weighted as the loss
    weights the examples."""
    weights = np.array([e.weight * loss_terms(e.sequence, config) for e in examples])
    size = float(np.average([e.size for e in examples], weights=weights)) if weights.sum() else 0.0
    return [e.scaled(1 / size) for e in examples] if size else examples


def _std(runs: Sequence[RunReturns]) -> float:
    """Return the standard deviation of the returns of all calls of `runs`; 0 for fewer than two."""
    numbers = np.concatenate([run.values for run in runs]) if runs else np.zeros(0)
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0


def loss_terms(sequence: TokenSequence, config: TrainerConfig) -> int:
    """Return how many terms of the loss's average a sequence has: 1 if the loss averages over sequences, else one for
    each trained token."""
    return 1 if config.loss.type == "grpo" else sequence.trained_tokens


def trajectory_weights(groups: Sequence[GroupWithHistory], config: TrainerConfig) -> dict[str, float]:
    """Return, by trajectory, the weight that gives every trajectory the same share of the loss. The mean weight of the
    loss's terms is 1. Empty if the settings weight no trajectory (`trainer.loss.weighting`)."""
    if config.loss.weighting == "loss":
        return {}
    terms: Counter[str] = Counter()
    for group in groups:
        for s in group.sequences:
            terms[s.trajectory] += loss_terms(s, config)
    mean = terms.total() / len(terms) if terms else 1.0
    return {trajectory: mean / n for trajectory, n in terms.items()}
