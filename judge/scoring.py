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
from typing import Literal, Protocol

from judge.groups import Arrival, Group, GroupKey, key_of
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


class UnscoredError(Exception):
    """No judge could score the group; the message says why."""


class Ruler(Protocol):
    """Scores trajectories by comparing them."""

    async def __call__(
        self, members: Sequence[TrajectoryCompleted]
    ) -> tuple[dict[str, float], tuple[Verdict, ...]]:
        """Score by trajectory id, and what was said. Raises `UnscoredError`."""


def judge_hash(config: JudgeConfig) -> str:
    """Names a judge configuration: settings that change scores, and none of those that don't."""
    return hashlib.sha256(config.model.encode()).hexdigest()[:16]


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
    group: Group, config: JudgeConfig, judge: str, ruler: Ruler | None
) -> GroupScored | GroupDiscarded:
    """The event that ends the group; `judge` is the judge configuration's hash."""
    scorable = [a for a in group.members if a.event.outcome == "scored"]
    rewards = {a.event.trajectory: r for a in scorable if (r := agent_reward(a.event)) is not None}
    missing = len(scorable) - len(rewards)
    verdicts: tuple[Verdict, ...]
    if missing and ruler is not None and len(scorable) >= config.min_size:
        try:
            final, verdicts = await ruler([a.event for a in scorable])
        except UnscoredError as error:
            return discarded(group, "unscored", str(error))
    else:
        if len(rewards) < minimum(group, config):
            detail = f"{len(scorable)} of {len(group.arrivals)} trajectories can be scored, {minimum(group, config)} are needed"
            if missing and ruler is None:
                detail = (
                    f"{missing} of {len(scorable)} trajectories carry no reward and judge.model is not set"
                )
            return discarded(group, "too_small", detail)
        final = rewards
        verdicts = (
            Verdict(
                judge_model=AGENT, scores=tuple(Score(trajectory=t, score=r) for t, r in rewards.items())
            ),
        )
    return GroupScored(
        project=group.key.project,
        model=group.key.model,
        group=group.key.group,
        split=group.key.split,
        task=next((a.event.task for a in group.members if a.event.task), ""),
        judge=judge,
        members=tuple(_member(a, final, rewards) for a in group.members),
        verdicts=verdicts,
        closed_by=group.closed_by,
    )


def _member(arrival: Arrival, final: Mapping[str, float], rewards: Mapping[str, float]) -> Member:
    event = arrival.event
    outcome: Outcome = event.outcome
    if outcome == "scored" and event.trajectory not in final:
        outcome = "masked"
    components = dict(event.rewards)
    if event.trajectory in rewards and outcome == "scored":
        components[AGENT] = rewards[event.trajectory]
    return Member(
        trajectory=event.trajectory,
        reward=final[event.trajectory] if outcome == "scored" else 0.0,
        outcome=outcome,
        split=event.split,
        components=components,
        exchanges=event.exchanges,
        first_step=event.first_step,
        last_step=event.last_step,
        completed_seq=arrival.seq,
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
