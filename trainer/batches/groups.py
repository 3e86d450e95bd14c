"""A scored group on its way from its event to a training batch: which members are trained, and their advantages.

Baseline and spread come from the scored members of the training split only. Members that infrastructure broke,
masked members and validation members are not trained and do not move the baseline.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.config import LossConfig, TrainerConfig
from pipeline.events import GroupScored, Member
from pipeline.events.group import DiscardReason
from pipeline.events.types import REWARD_TOLERANCE
from pipeline.log.broker import Delivery
from pipeline.log.messages import Place
from trainer.batches.returns import (
    NO_ROLES,
    Floats,
    Roles,
    baseline,
    by_token,
    differ,
    group_returns,
    places,
    reached,
    role_baselines,
    spread,
)
from trainer.batches.sequences import TokenSequence
from trainer.batches.tasks import Earlier, task_baselines
from trainer.distillation.lessons import Answer, Lesson, Teaching, lessons_of, teaching_of

_STD_FLOOR = 1e-4


@dataclass(frozen=True)
class Refusal:
    """Why a group is not trained."""

    reason: DiscardReason
    detail: str


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence with the advantage of its trajectory, or of the calls in it."""

    sequence: TokenSequence
    advantage: float
    call_advantages: npt.NDArray[np.float64] | None = None
    """In place of `advantage`, that of the call that sampled each trained token, [k]. `None`: all have the same."""
    weight: float = 1.0
    """Factor on the advantage that evens out long and short trajectories (`trainer.loss.weighting`)."""
    old_logprobs: np.ndarray[Any, np.dtype[np.floating[Any]]] | None = None
    """Logprobs of the trained tokens, [k] in nats, by the policy before the first of several updates of a step.
    `None` where a step takes one update."""
    kl_penalty: np.ndarray[Any, np.dtype[np.floating[Any]]] | None = None
    """What `trainer.loss.kl_penalty` adds to the advantage of each trained token, [k]."""
    lessons: tuple[Lesson, ...] = ()
    """What the teacher is to be asked in the step."""
    teaching: Teaching | None = None
    """What a teacher said of the trained tokens."""
    late: bool = False
    """Whether it is older than `trainer.max_staleness`, and corrected as `trainer.late` says."""


@dataclass(eq=False)
class TrainingGroup:
    """A scored group from its event to the batch that trains it."""

    event: GroupScored
    place: Place
    """Where the event lies in GROUPS."""
    delivery: Delivery | None = None
    """`None` for a group that was read from the log at start and is not delivered yet."""
    sequences: list[TokenSequence] | None = None
    """Sequences of the members that train; `None` until the exchanges are read (`trainer.batches.histories`)."""
    hinted: dict[str, dict[int, npt.NDArray[np.int32]]] = field(default_factory=dict)
    """Prompts of the teacher, by trajectory and call (`trainer.distillation.prompts`)."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """What a teacher from outside said, by trajectory; empty where none is asked."""
    hints: int = 0
    """Number of hints on calls, with the group's best run for each call that it is shown to."""
    hints_unused: int = 0
    """Number of hints that no prompt could be made of."""
    unjudged_tokens: int = 0
    """Number of tokens that are context because nothing judged their calls."""
    roles: dict[str, dict[int, str]] = field(default_factory=dict)
    """The agent of each call that names one, by trajectory and call."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of sampled tokens that are not trained because of a sampling setting, by the name of the setting."""
    stale_tokens: int = 0
    """Number of tokens that `bound_staleness` made context."""
    late_refused: str = ""
    """Why its late tokens are not trained, where `trainer.late` trains such tokens."""
    earlier: Earlier = field(default_factory=Earlier)
    """The earlier runs of its task (`trainer.batches.tasks`), with `trainer.loss.baseline` = `task`."""
    duration_s: float = 0.0
    """Seconds from the first call to the last answer of the longest trajectory; 0 until the exchanges are read."""

    @property
    def members(self) -> list[Member]:
        return trainable_members(self.event)

    def staleness_bound(self, config: TrainerConfig) -> int:
        """How many steps ago a token may have been sampled. Offline groups have no bound, nor has supervised
        fine-tuning, nor what `trainer.late` corrects."""
        unbounded = self.event.offline or config.late != "off"
        if config.loss.type == "sft" or (unbounded and not self.late_refused):
            return sys.maxsize
        return config.max_staleness

    def refusal(self, step: int, config: TrainerConfig) -> Refusal | None:
        """Why the group can't be trained at `step`, judged by its event alone."""
        members, bound = self.members, self.staleness_bound(config)
        if self.event.members and all(m.split == "val" for m in self.event.members):
            return Refusal("validation", "every member is a validation run")
        compared = self._compared(config) and not self._taught(config)
        if len(members) < 1 + compared:
            return Refusal(
                "too_small",
                f"{len(members)} scored member(s) in the training split; at least {1 + compared} are needed",
            )
        if compared and self._alike(config):
            return self._no_variance()
        newest = max((m.last_step for m in members if m.exchanges), default=step)
        if step - newest > bound:
            why = f"newest token is from step {newest}, the policy is at {step}, the bound is {bound}"
            return Refusal("stale", why + (f"; {self.late_refused}" if self.late_refused else ""))
        return None

    @staticmethod
    def _compared(config: TrainerConfig) -> bool:
        """Whether rewards are compared within the group."""
        return config.loss.baseline == "group" and config.loss.type != "sft"

    def _taught(self, config: TrainerConfig) -> bool:
        """Whether the group's event names something that the step's teacher teaches a run by."""
        distill = config.distill
        return distill.weight > 0 and any(
            m.teacher if distill.asks_outside else m.hints for m in self.members
        )

    def teaching(self, sequence: TokenSequence) -> Teaching | None:
        """What a teacher from outside said of a sequence; `None` if nothing."""
        return teaching_of(sequence, self.answers.get(sequence.trajectory, ()))

    def _alike(self, config: TrainerConfig) -> bool:
        """Whether the returns that are compared are equal; those of a single member are. Before the exchanges are read,
        the number of calls of each run is its event's, and all calls are of one agent."""
        discount = config.loss.turn_discount
        by_call = differ(self.members, discount)
        roles = self.roles if by_call else {}
        returns = group_returns(self.members, self.sequences or (), discount, by_call=by_call, roles=roles)
        runs = [
            (of_run, places(len(of_run), roles.get(member.trajectory, NO_ROLES)))
            for member, of_run in zip(self.members, returns, strict=True)
        ]
        return spread(runs) <= REWARD_TOLERANCE

    def _no_variance(self, why: str = "") -> Refusal:
        rewards = [m.reward for m in self.members]
        alike = max(rewards) - min(rewards) <= REWARD_TOLERANCE
        equal = f"rewards are {rewards[0]:.6g}" if alike else "returns are equal"
        return Refusal("no_variance", f"all {len(rewards)} {equal}{why}")

    def bound_staleness(self, step: int, config: TrainerConfig) -> Refusal | None:
        """Make the tokens that are too old at `step` context, and drop the sequences that have no other token to train.
        If the group's late tokens were refused, tokens of later versions become context, too.

        Returns the reason where no token is left, or where rewards are equal and no hint and no answer of a teacher can
        be used. Requires `sequences`."""
        assert self.sequences is not None
        bound = self.staleness_bound(config)
        trained: list[TokenSequence] = []
        for sequence in self.sequences:
            lags = step - sequence.steps.astype(np.int64)
            # All that `is_late` counts must become context, or the next attempt at the step is refused again.
            too_new = (lags < 0) if self.late_refused else False
            stale = sequence.loss_mask & ((lags > bound) | too_new)
            if stale.any():
                self.stale_tokens += int(stale.sum())
                sequence = sequence.masking_out(stale)
            if sequence.loss_mask.any():
                trained.append(sequence)
        self.sequences = trained
        if trained:
            if not self._compared(config) or not self._alike(config):
                return None
            if not self._taught(config):
                return self._no_variance()  # the calls' agents, known only now, make the returns equal
            if any(lessons_of(s, self.hinted.get(s.trajectory, {})) or self.teaching(s) for s in trained):
                return None
            if config.distill.asks_outside:
                return self._no_variance(
                    " and the teacher's answers are about other tokens than those trained, or about tokens that were "
                    "not sampled at temperature 1"
                )
            return self._no_variance(
                f" and no hint can be used: of {self.hints}, no prompt could be made of {self.hints_unused} (the "
                "trainer's log says why), and the others are on calls that are not trained"
            )
        if self.stale_tokens:
            why = f"all {self.stale_tokens} tokens are more than {bound} steps old at step {step}"
            if self.late_refused:
                why += f" or of a later version; {self.late_refused}"
            return Refusal("stale", why)
        why = "; ".join(f"{n} tokens were sampled under {what}" for what, n in self.left_out.items())
        if not any(m.exchanges for m in self.members):
            why = "none made a recorded call; a run's client needs the run's own base_url and api_key (`run.openai`)"
        return Refusal("no_tokens", "no member has a token to train" + (f": {why}" if why else ""))


def trainable_members(event: GroupScored) -> list[Member]:
    """The members that are compared and trained: scored, in the training split, with a finite reward."""
    return [
        m for m in event.members if m.outcome == "scored" and m.split == "train" and np.isfinite(m.reward)
    ]


def examples(groups: Sequence[TrainingGroup], config: TrainerConfig) -> list[Example]:
    """Every sequence of the batch with its scaled advantage, in the order of the groups.

    The advantage is the reward minus the mean reward of the group, of the task's earlier runs or of the batch
    (`trainer.loss.baseline`), divided as `trainer.loss.advantage_scaling` says, then balanced and normalised by the
    settings after it. Where rewards belong to calls, it is their returns that are compared (`trainer.batches.returns`).
    With loss type `sft` it is the reward."""
    weights = trajectory_weights(groups, config)
    if config.loss.type == "sft":
        return [
            Example(s, reward_of[s.trajectory], weight=weights.get(s.trajectory, 1.0))
            for g in groups
            # Another verdict set may say otherwise.
            for reward_of in ({m.trajectory: m.reward for m in g.members},)
            for s in g.sequences or ()
        ]
    loss = config.loss
    differing = {g: differ(g.members, loss.turn_discount) for g in groups}
    if "batch" in (loss.baseline, loss.advantage_scaling):  # so all are compared at the same position
        differing = dict.fromkeys(groups, any(differing.values()))
    by_role = loss.baseline != "task" and any(g.roles and differing[g] for g in groups)
    returns = {
        g: group_returns(
            g.members, g.sequences or (), loss.turn_discount, by_call=differing[g],
            roles=g.roles if by_role else None,
        )
        for g in groups
    }  # fmt: skip
    batch_std = _std([r for of_group in returns.values() for r in of_group])
    baselines = _baselines(groups, loss.baseline, returns, by_role=by_role)
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
                member, (of_calls - mean[: len(of_calls)]) / divisor, loss, group.roles.get(member.trajectory, NO_ROLES)
            )
            for member, of_calls, mean in zip(group.members, returns[group], baselines[group], strict=True)
        }  # fmt: skip
        out += [
            Example(
                s, float(advantage_of[s.trajectory][0]), by_token(advantage_of[s.trajectory], s),
                weight=weights.get(s.trajectory, 1.0), lessons=lessons_of(s, group.hinted.get(s.trajectory, {})),
                teaching=group.teaching(s),
            )
            for s in group.sequences or ()
        ]  # fmt: skip
    return out if loss.advantage_normalization == "none" else _normalized(out, config)


def _baselines(
    groups: Sequence[TrainingGroup],
    kind: Literal["group", "task", "batch"],
    returns: Mapping[TrainingGroup, list[Floats]],
    *,
    by_role: bool,
) -> dict[TrainingGroup, list[Floats]]:
    """What is subtracted from the returns of each run's calls, by group and in the order of its members."""
    batch = [r for of_group in returns.values() for r in of_group]
    batch_means = baseline(batch, max(map(len, batch), default=0))
    if kind == "task":
        return {g: task_baselines(returns[g], g.earlier, batch_means) for g in groups}
    if not by_role and kind == "batch":
        return {g: [batch_means] * len(returns[g]) for g in groups}
    if not by_role:
        longest = {g: max(map(len, returns[g]), default=0) for g in groups}
        return {g: [baseline(returns[g], longest[g])] * len(returns[g]) for g in groups}
    runs = {
        g: [
            (r, places(len(r), g.roles.get(m.trajectory, NO_ROLES)))
            for m, r in zip(g.members, returns[g], strict=True)
        ]
        for g in groups
    }
    out = {}
    for group in groups:
        compared = [group] if kind == "group" else groups
        of_roles = role_baselines([run for g in compared for run in runs[g]])
        out[group] = [np.array([of_roles[role][at] for role, at in own]) for _, own in runs[group]]
    return out


def _advantages(member: Member, differences: Floats, loss: LossConfig, roles: Roles) -> Floats:
    """The advantage of each call of a run, from the scaled differences to its baseline. Where only calls were judged, a
    last number, 0, is that of the calls after them: a teacher may teach calls that no reward reaches."""
    balance = loss.advantage_balance
    advantages = np.where((differences < 0) == (balance > 0), differences * (1 - abs(balance)), differences)
    if member.graded == "calls":
        return np.append(advantages * reached(member, len(advantages), loss.turn_discount, roles), 0.0)
    return advantages


def _normalized(out: list[Example], config: TrainerConfig) -> list[Example]:
    """The examples with advantages of the mean size 1, weighted as the loss weights them."""
    shares = np.array([e.weight * units(e.sequence, config) for e in out])
    sizes = [
        abs(e.advantage) if e.call_advantages is None else float(np.abs(e.call_advantages).mean())
        for e in out
    ]
    size = float(np.average(sizes, weights=shares)) if shares.sum() else 0.0
    if not size:
        return out
    return [
        dataclasses.replace(
            e, advantage=e.advantage / size,
            call_advantages=None if e.call_advantages is None else e.call_advantages / size,
        )
        for e in out
    ]  # fmt: skip


def _std(returns: Sequence[npt.NDArray[np.float64]]) -> float:
    """The standard deviation of the returns of all calls of some runs."""
    numbers = np.concatenate(returns) if returns else np.zeros(0)
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0


def units(sequence: TokenSequence, config: TrainerConfig) -> int:
    """How often the loss counts a sequence: losses that average over sequences once, the others once per token."""
    return 1 if config.loss.type in ("grpo", "sapo") else sequence.trained_tokens


def trajectory_weights(groups: Sequence[TrainingGroup], config: TrainerConfig) -> dict[str, float]:
    """By trajectory, the factor that gives every trajectory the same share of the loss; the mean over what the loss
    averages is 1."""
    if config.loss.weighting == "loss":
        return {}
    shares: dict[str, int] = {}
    for group in groups:
        for s in group.sequences or ():
            shares[s.trajectory] = shares.get(s.trajectory, 0) + units(s, config)
    mean = sum(shares.values()) / len(shares) if shares else 1.0
    return {trajectory: mean / n for trajectory, n in shares.items()}
