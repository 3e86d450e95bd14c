"""The stages of a scored group on its way to a training batch, and why one is refused.

The intake admits a group from the log (`AdmittedGroup`). Before its step the exchanges of its runs are read
(`GroupWithHistory`). The batch then gives each of its sequences an advantage (`trainer.batches.examples`).

Members that infrastructure broke, masked members and validation members are not trained and do not move the baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config import TrainerConfig
from pipeline.events import GroupScored, Member
from pipeline.events.group import DiscardReason
from pipeline.events.types import REWARD_TOLERANCE
from pipeline.log.broker import Delivery
from pipeline.log.messages import Place
from trainer.batches.returns import Roles, group_returns, has_call_returns, largest_difference
from trainer.batches.tasks import EarlierReturns
from trainer.distillation.teacher import (
    HintedCall,
    TeacherAnswer,
    TeacherLogprobs,
    hinted_calls_of,
    teacher_logprobs_of,
)
from trainer.sequences import TokenSequence
from trainer.staleness import stale_tokens, token_bound


@dataclass(frozen=True)
class Refusal:
    """Why a group is not trained."""

    reason: DiscardReason
    detail: str
    duration_s: float | None = None
    """Seconds from the first call to the last answer of its longest run, as far as exchanges could be read. `None`:
    none was read."""


_RUN_METRICS = 256
"""Limit on the names of agents' metrics in a step."""


@dataclass(eq=False)
class AdmittedGroup:
    """A group that the intake took from the log. If it is delivered again, the intake renews place and delivery."""

    event: GroupScored
    place: Place
    delivery: Delivery | None = None
    """`None` for a group that was read from the log at start and is not delivered yet."""
    earlier: EarlierReturns = field(default_factory=EarlierReturns)
    """The earlier runs of its task (`trainer.batches.tasks`), with `trainer.loss.baseline` = `task`."""

    @property
    def members(self) -> list[Member]:
        """The members that are compared and trained."""
        return trainable_members(self.event)

    def refusal(self, step: int, config: TrainerConfig) -> Refusal | None:
        """Why the group can't be trained at `step`, judged by its event alone, as if one agent had made all calls;
        `None` if the event shows no reason."""
        return _refusal(self, step, config, History())


@dataclass(eq=False)
class History:
    """What the log holds of a group's runs. `trainer.batches.histories` reads it."""

    sequences: tuple[TokenSequence, ...] = ()
    """Sequences of the members that train."""
    teacher_prompts: dict[str, dict[int, npt.NDArray[np.int32]]] = field(default_factory=dict)
    """Prompts of the teacher, by trajectory and call (`trainer.distillation.prompts`)."""
    hints: int = 0
    """Number of hints on calls. The group's best run counts once for each call that it is shown to."""
    hints_unused: int = 0
    """Number of hints that no prompt could be made of."""
    answers: dict[str, list[TeacherAnswer]] = field(default_factory=dict)
    """Logprobs by a teacher from outside, by trajectory; empty where none is asked."""
    unjudged_tokens: int = 0
    """Number of tokens that are context because nothing judged their calls."""
    roles: dict[str, Roles] = field(default_factory=dict)
    """The agent of each call that names one, by trajectory and call."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of sampled tokens that are not trained because of a sampling setting, by the name of the setting."""
    duration_s: float = 0.0
    """Seconds from the first call to the last answer of the longest trajectory."""

    def hinted_calls(self, sequence: TokenSequence) -> tuple[HintedCall, ...]:
        """The calls of a sequence that have a teacher's prompt."""
        return hinted_calls_of(sequence, self.teacher_prompts.get(sequence.trajectory, {}))

    def teacher_logprobs(self, sequence: TokenSequence) -> TeacherLogprobs | None:
        """The logprobs of a sequence's tokens by a teacher from outside; `None` if there are none."""
        return teacher_logprobs_of(sequence, self.answers.get(sequence.trajectory, ()))


@dataclass(frozen=True, eq=False)
class GroupWithHistory:
    """A group whose exchanges are read."""

    admitted: AdmittedGroup
    history: History
    stale_tokens: int = 0
    """Number of tokens that `within_staleness` made context."""
    late_refused: str = ""
    """Why the correction of its late sequences was refused (`trainer.late`); empty if it was not."""

    @property
    def event(self) -> GroupScored:
        return self.admitted.event

    @property
    def members(self) -> list[Member]:
        return self.admitted.members

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        return self.history.sequences

    def refusal(self, step: int, config: TrainerConfig) -> Refusal | None:
        """Why the group can't be trained at `step`, judged by its event and its history; `None` if they show no reason.
        Single tokens may still be too old (`within_staleness`)."""
        refusal = _refusal(self.admitted, step, config, self.history, self.late_refused)
        return refusal and self._with_duration(refusal)

    def within_staleness(self, step: int, config: TrainerConfig) -> GroupWithHistory | Refusal:
        """Return the group in which the tokens that are too old at `step` are context, without the sequences that have
        no other token to train. If its late tokens were refused, tokens of later versions become context, too.

        Returns the reason where no token is left, or where rewards are equal and no hint and no answer of a teacher can
        be used."""
        bound = token_bound(config, offline=self.event.offline, late_refused=bool(self.late_refused))
        count = self.stale_tokens
        trained: list[TokenSequence] = []
        for sequence in self.sequences:
            # All that `is_late` counts must become context, or the next attempt at the step is refused again.
            stale = stale_tokens(sequence, step, bound, later_too=bool(self.late_refused))
            if stale.any():
                count += int(stale.sum())
                sequence = sequence.masking_out(stale)
            if sequence.loss_mask.any():
                trained.append(sequence)
        history = replace(self.history, sequences=tuple(trained))
        group = replace(self, history=history, stale_tokens=count)
        refusal = group._no_signal(config) if trained else group._no_tokens(step, bound)
        return group._with_duration(refusal) if refusal else group

    def _with_duration(self, refusal: Refusal) -> Refusal:
        """Return the refusal with the duration of the longest run, which shows whether long tasks starve."""
        return replace(refusal, duration_s=self.history.duration_s)

    def _no_tokens(self, step: int, bound: int) -> Refusal:
        """Return the refusal of a group without a token to train. `bound`: how many steps old a token may be."""
        if self.stale_tokens:
            why = f"all {self.stale_tokens} tokens are more than {bound} steps old at step {step}"
            if self.late_refused:
                why += f" or of a later version; {self.late_refused}"
            return Refusal("stale", why)
        left_out = self.history.left_out
        why = "; ".join(f"{n} tokens were sampled under {setting}" for setting, n in left_out.items())
        if not any(m.exchanges for m in self.members):
            why = "none made a recorded call; a run's client needs the run's own base_url and api_key (`run.openai`)"
        return Refusal("no_tokens", "no member has a token to train" + (f": {why}" if why else ""))

    def _no_signal(self, config: TrainerConfig) -> Refusal | None:
        """Why the group can't change the policy; `None` if it can.

        It can't where its returns are equal, so that every advantage is 0, and no teacher has logprobs of a token that
        is trained: hints or answers may turn out to be unusable once the calls are read."""
        history, members = self.history, self.members
        if not _compares_within_group(config) or not _has_equal_returns(members, config, history):
            return None
        if not _has_teacher(members, config):
            return _no_variance(members)  # the calls' agents, known only now, make the returns equal
        if any(history.hinted_calls(s) or history.teacher_logprobs(s) for s in self.sequences):
            return None
        if config.distill.asks_outside:
            return _no_variance(
                members,
                " and the teacher's answers are about other tokens than those trained, or about tokens that were not "
                "sampled at temperature 1",
            )
        return _no_variance(
            members,
            f" and no hint can be used: of {history.hints}, no prompt could be made of {history.hints_unused} (the "
            "trainer's log says why), and the others are on calls that are not trained",
        )


def trainable_members(event: GroupScored) -> list[Member]:
    """The members that are compared and trained: scored, in the training split, with a finite reward."""
    return [m for m in event.members if m.outcome == "scored" and m.split == "train" and np.isfinite(m.reward)]


def _refusal(
    group: AdmittedGroup, step: int, config: TrainerConfig, history: History, late_refused: str = ""
) -> Refusal | None:
    """Why a group can't be trained at `step`: a validation group, too few members, equal rewards, or tokens that are
    all too old. `None` if there is no such reason. `history` is empty until the exchanges are read; `late_refused` as
    `GroupWithHistory.late_refused`."""
    event, members = group.event, group.members
    if event.members and all(m.split == "val" for m in event.members):
        return Refusal("validation", "every member is a validation run")
    needs_variance = _compares_within_group(config) and not _has_teacher(members, config)
    least = 2 if needs_variance else 1
    if len(members) < least:
        return Refusal(
            "too_small", f"{len(members)} scored member(s) in the training split; at least {least} are needed"
        )
    if needs_variance and _has_equal_returns(members, config, history):
        return _no_variance(members)
    bound = token_bound(config, offline=event.offline, late_refused=bool(late_refused))
    newest = max((m.last_step for m in members if m.exchanges), default=step)
    if step - newest > bound:
        why = f"newest token is from step {newest}, the policy is at {step}, the bound is {bound}"
        return Refusal("stale", why + (f"; {late_refused}" if late_refused else ""))
    return None


def _compares_within_group(config: TrainerConfig) -> bool:
    """Whether the rewards of a group are compared with each other, so that equal ones train nothing."""
    return config.loss.baseline == "group" and config.loss.type != "sft"


def _has_teacher(members: Sequence[Member], config: TrainerConfig) -> bool:
    """Whether a run of the group has a teacher: hints, or the answer of a teacher from outside, whichever the settings
    distill."""
    distill = config.distill
    return distill.weight > 0 and any(m.teacher if distill.asks_outside else m.hints for m in members)


def _has_equal_returns(members: Sequence[Member], config: TrainerConfig, history: History) -> bool:
    """Whether all returns that are compared with each other are equal, as those of a single member are."""
    discount = config.loss.turn_discount
    by_call = has_call_returns(members, discount)
    runs = group_returns(members, history.sequences, discount, by_call=by_call, roles=history.roles)
    return largest_difference(runs) <= REWARD_TOLERANCE


def _no_variance(members: Sequence[Member], why: str = "") -> Refusal:
    """Return the refusal of a group whose returns are equal. `why` is added to its detail."""
    rewards = [m.reward for m in members]
    rewards_equal = max(rewards) - min(rewards) <= REWARD_TOLERANCE
    finding = f"rewards are {rewards[0]:.6g}" if rewards_equal else "returns are equal"
    return Refusal("no_variance", f"all {len(rewards)} {finding}{why}")


class DiscardedGroup(NamedTuple):
    """A group that was not trained, as the metrics of the next step count it."""

    rewards: Sequence[float]
    """Of its training members."""
    equal: bool
    """Whether it was discarded because its returns were all equal."""


def group_metrics(batch: Sequence[GroupWithHistory], discarded: Sequence[DiscardedGroup]) -> dict[str, float]:
    """Return the metrics of a step's groups, and of those that were discarded since the step before."""
    members = [m for g in batch for m in g.members]
    rewards = np.array([m.reward for m in members], np.float64)
    discarded_rewards = [reward for group in discarded for reward in group.rewards]
    equal_groups = sum(group.equal for group in discarded)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_mean_all": float(np.mean([*rewards, *discarded_rewards])),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "groups": float(len(batch)),
        "no_variance_share": equal_groups / (equal_groups + len(batch)),
        "trajectories": float(len(members)),
        "tokens_stale": float(sum(g.stale_tokens for g in batch)),
        "tokens_unjudged": float(sum(g.history.unjudged_tokens for g in batch)),
        "tokens_left_out": float(sum(g.history.left_out.total() for g in batch)),
        "hints": float(sum(g.history.hints for g in batch)),
        "hints_unused": float(sum(g.history.hints_unused for g in batch)),
        **_run_metrics(members),
    }


def _run_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Return the mean of each metric that agents gave to runs, over the runs that have it, as `run/<name>`: of the
    first `_RUN_METRICS` names, as every service keeps a step's metrics in memory."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.metrics.items():
            if name in values or len(values) < _RUN_METRICS:
                values.setdefault(name, []).append(value)
    return {f"run/{name}": float(np.mean(of_name)) for name, of_name in values.items()}
