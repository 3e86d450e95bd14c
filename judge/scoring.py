"""From a closed group to the event that says what became of it.

Members without a result and masked ones are named in the event and never scored, so they can't move the baseline. Where
every scorable member brought a reward of its own, those rewards are the scores and no model is asked (judge model
`agent`). Where one is missing, RULER scores them all, because rewards on two scales can't be compared; without a judge
model the members without a reward are listed as masked and the rest are scored, if they are enough to compare.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from judge.groups import Group, GroupKey, key_of
from judge.models.params import scoring_params
from judge.ruler.rubrics import load_rubric
from pipeline.config import JudgeConfig
from pipeline.events import (
    GroupDiscarded,
    GroupScored,
    Member,
    Outcome,
    Score,
    TrajectoryCompleted,
    Verdict,
)

AGENT = "agent"
"""Judge model of verdicts that pass agents' rewards through."""


Reason = Literal["too_small", "late", "unscored"]
PROMPT_VERSION = 2
"""Goes into the judge configuration's hash: raise it when the way of asking changes."""


class UnscoredError(Exception):
    """No judge could score the group; the message says why."""


@dataclass(frozen=True)
class Scores:
    """What a group's members are worth."""

    final: Mapping[str, float]
    """Reward by trajectory; one that is not in it could not be scored."""
    components: Mapping[str, Mapping[str, float]]
    """What went into it, by trajectory and name."""
    verdicts: tuple[Verdict, ...]
    missing: str = ""
    """Why some have no reward."""


class Composer(Protocol):
    """Scores members whose agents' own rewards are not the whole answer."""

    async def __call__(self, members: Sequence[TrajectoryCompleted]) -> Scores:
        """Raises `UnscoredError` where the group can't be scored at all."""


def judge_hash(config: JudgeConfig) -> str:
    """Names a judge configuration: the settings and rubrics that change scores, and none of those that don't."""
    what: dict[str, object] = {"rewards": config.rewards, "combine": config.combine if config.rewards else ""}
    if config.model:
        what |= {
            "model": config.model,
            "fallbacks": config.fallbacks,
            "rubrics": [load_rubric(config.rubric).hash]
            + [load_rubric(r.rubric).hash for r in config.rewards if r.kind == "ruler"],
            "judgings": config.passes,
            "agreement": config.agreement,
            "temperature": config.request.temperature,
            "context_tokens": config.context_tokens,
            "params": scoring_params(config),
            "prompt": PROMPT_VERSION,
        }
    return hashlib.sha256(msgspec.json.encode(what, order="sorted")).hexdigest()[:16]


def agent_reward(event: TrajectoryCompleted) -> float | None:
    """What the agent says its run was worth: its reward, else the sum of its named ones; none where it says nothing
    that is a finite number."""
    value = event.reward
    if value is None and event.rewards:
        value = math.fsum(event.rewards.values())
    return value if value is not None and math.isfinite(value) else None


def minimum(group: Group, config: JudgeConfig) -> int:
    """Validation rewards are only read, not compared, so one is enough."""
    return 1 if group.key.split == "val" else config.min_size


async def score(
    group: Group, config: JudgeConfig, judge: str, composer: Composer | None
) -> GroupScored | GroupDiscarded:
    """The event that ends the group; `judge` is the judge configuration's hash."""
    scorable = [a.event for a in group.members if a.event.outcome == "scored"]
    needed = minimum(group, config)
    if len(scorable) < needed:
        return discarded(group, "too_small", _too_few(len(scorable), len(group.arrivals), needed))
    scores = agents_own(scorable)
    if composer is not None and (config.rewards or len(scores.final) < len(scorable)):
        try:
            scores = await composer(scorable)
        except UnscoredError as error:
            return discarded(group, "unscored", str(error))
    if len(scores.final) < needed:
        reason: Reason = "unscored" if config.rewards else "too_small"
        why = scores.missing or _too_few(len(scores.final), len(group.arrivals), needed)
        return discarded(group, reason, why)
    return GroupScored(
        project=group.key.project,
        model=group.key.model,
        group=group.key.group,
        split=group.key.split,
        task=next((a.event.task for a in group.members if a.event.task), ""),
        judge=judge,
        members=tuple(member_of(a.event, a.seq, scores) for a in group.members),
        verdicts=scores.verdicts,
        closed_by=group.closed_by,
    )


def _too_few(usable: int, total: int, needed: int) -> str:
    return f"{usable} of {total} trajectories can be scored, {needed} are needed"


def agents_own(members: Sequence[TrajectoryCompleted]) -> Scores:
    """The rewards that agents gave, as they are."""
    final = {e.trajectory: r for e in members if (r := agent_reward(e)) is not None}
    lacking = len(members) - len(final)
    return Scores(
        final,
        {e.trajectory: {**e.rewards, AGENT: final[e.trajectory]} for e in members if e.trajectory in final},
        (Verdict(judge_model=AGENT, scores=tuple(Score(trajectory=t, score=r) for t, r in final.items())),),
        f"{lacking} of {len(members)} trajectories carry no reward and judge.model is not set"
        if lacking
        else "",
    )


def member_of(event: TrajectoryCompleted, seq: int, scores: Scores) -> Member:
    """The trajectory's place in its scored group; `seq` is its stream sequence."""
    outcome: Outcome = event.outcome
    if outcome == "scored" and event.trajectory not in scores.final:
        outcome = "masked"
    return Member(
        trajectory=event.trajectory,
        reward=scores.final[event.trajectory] if outcome == "scored" else 0.0,
        outcome=outcome,
        split=event.split,
        components=dict(scores.components.get(event.trajectory, event.rewards)),
        exchanges=event.exchanges,
        first_step=event.first_step,
        last_step=event.last_step,
        completed_seq=seq,
    )


def discarded(group: Group, reason: Reason, detail: str) -> GroupDiscarded:
    """The group will not train, and why."""
    return _discarded(group.key, [a.event for a in group.members], reason, detail)


def late(event: TrajectoryCompleted) -> GroupDiscarded:
    """A trajectory whose group was closed before it came."""
    return _discarded(key_of(event), [event], "late", "its group was closed when it completed")


def _discarded(
    key: GroupKey, events: Sequence[TrajectoryCompleted], reason: Reason, detail: str
) -> GroupDiscarded:
    took = max((e.at - e.opened_at for e in events if e.opened_at), default=0)
    return GroupDiscarded(
        project=key.project,
        model=key.model,
        group=key.group,
        split=key.split,
        trajectories=tuple(e.trajectory for e in events),
        reason=reason,
        by="judge",
        detail=detail,
        duration_s=max(took, 0) / 1e6,
    )
