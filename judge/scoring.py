"""From a closed group to the event that records its result: `group.scored`, or `group.discarded` with the reason.

The judge service calls `score_closed`; `judge.commands.rejudge` uses the parts of it for groups of the past. Who scores
is passed in as a function (`Compose`), and so is the teacher from outside, a server whose model gives logprobs of the
recorded tokens (`AskTeacher`).

Members with outcome `no_result` or `masked` are listed in the event and never scored, so they do not affect the
baseline. Where `judge.rewards` is empty and every other member has a reward of its agent, those rewards are the scores
and no model is asked (judge model `agent`). If one has none, RULER scores all of them, because rewards on two scales
cannot be compared. Without a judge model the members without a reward are listed as masked, and the others are scored
if they are enough to compare. With `judge.rewards`, `Compose` is always asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from judge.errors import UnscoredError
from judge.feedback import RunFeedback, feedback_on
from judge.groups import Group, GroupKey, key_of
from judge.models.params import scoring_params
from judge.reward_parts import is_usable
from judge.ruler.rubrics import load_rubric, rubric_of
from pipeline.config import JudgeConfig
from pipeline.events import GroupDiscarded, GroupScored, Member, Score, SignalGiven, TrajectoryCompleted, Verdict
from pipeline.events.group import DiscardReason

AGENT = "agent"
"""Judge model in verdicts that pass agents' rewards through."""
PROMPT_VERSION = 10
"""Part of the judge configuration's hash. Raise it when the prompt or the parsing of replies changes."""


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of a group's members."""

    final: Mapping[str, float]
    """Score of each trajectory. A trajectory that could not be scored is missing."""
    components: Mapping[str, Mapping[str, float]]
    """The parts of each reward, by trajectory and name."""
    verdicts: tuple[Verdict, ...]
    missing: str = ""
    """Why some trajectories have no reward, for the detail of a discard."""
    feedback: Mapping[str, RunFeedback] = field(default_factory=dict)
    """What else is known of a run: rewards of its calls, hints, and who graded it; by trajectory."""
    of_calls: bool = False
    """Whether only calls were judged, no run as a whole."""
    taught: Mapping[str, str] = field(default_factory=dict)
    """The teacher from outside that answered about a run, by trajectory."""


Compose = Callable[[Sequence[TrajectoryCompleted], Sequence[SignalGiven]], Awaitable[GroupRewards]]
"""Scores the members of a group by the settings; the signals were given about them. Raises `UnscoredError`."""
AskTeacher = Callable[[Sequence[TrajectoryCompleted]], Awaitable[Mapping[str, str]]]
"""Asks a teacher from outside about runs. Returns its name by trajectory, of the runs with an answer."""


def judge_hash(config: JudgeConfig) -> str:
    """Return the identity of a judge configuration: a hash of the settings and rubrics that can change scores."""
    identity: dict[str, object] = {"rewards": config.rewards, "combine": config.combine if config.rewards else ""}
    if config.model:
        with_rubric = [r for r in config.rewards if r.kind in ("ruler", "next_state")]
        identity |= {
            "model": config.model,
            "rubrics": [load_rubric(config.rubric).hash, *(rubric_of(r, config).hash for r in with_rubric)],
            "judgings": config.passes,
            "temperature": config.request.temperature,
            "context_tokens": config.context_tokens,
            "max_images": config.max_images,
            "params": scoring_params(config),
            "prompt": PROMPT_VERSION,
        }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:16]


def agent_reward(event: TrajectoryCompleted) -> float | None:
    """Return the agent's own reward, or the sum of its named ones; `None` if there is none or it is not usable."""
    value = sum(event.rewards.values()) if event.reward is None and event.rewards else event.reward
    return value if is_usable(value) else None


async def score_closed(
    group: Group,
    config: JudgeConfig,
    judge: str,
    compose: Compose | None,
    teach: AskTeacher | None = None,
    *,
    over_budget: str = "",
) -> GroupScored | GroupDiscarded:
    """Score a closed group, one to which no member is added any more, and return the event with the result. `judge`:
    the verdict set. `compose`: `None` if only agents' own rewards are used. `over_budget`: why the group is not to be
    scored, empty if it is; with a reason, neither a judge nor a teacher is asked.

    A group that can't be scored, or has too few rewards to compare, is discarded with the reason. A group of a
    requested batch is always scored, perhaps with masked members only: the trainer waits for every group of the batch,
    and itself discards those that it can't train."""
    events = [a.event for a in group.members]
    scorable = [e for e in events if e.outcome == "scored"]
    batch = next((e.batch for e in events if e.batch is not None), None)
    # Validation rewards are only reported, not compared, so one member is enough.
    needed = 1 if group.key.split == "val" else config.min_size
    rewards = GroupRewards({}, {}, ())
    if batch is None and len(scorable) < needed:
        return _discarded(group.key, events, "too_small", _too_few(len(scorable), len(events), needed))
    if batch is None and over_budget:
        return _discarded(group.key, events, "over_budget", over_budget)
    if not over_budget:
        try:
            rewards = await _ask_for_rewards(scorable, group.signals, config, compose)
        except UnscoredError as error:
            if batch is None:
                return _discarded(group.key, events, "unscored", str(error))
        rewards = await with_hints_and_answers(rewards, scorable, group.signals, config, teach)
    if batch is None and len(rewards.final) < needed:
        why = rewards.missing or _too_few(len(rewards.final), len(events), needed)
        # "unscored": the judge lacks parts of `judge.rewards`. "too_small": too few agents reported a reward.
        return _discarded(group.key, events, "unscored" if config.rewards else "too_small", why)
    return GroupScored(
        **group.key._asdict(),
        task=next((e.task for e in events if e.task), ""),
        judge=judge,
        members=tuple(make_member(a.event, a.seq, rewards) for a in group.members),
        verdicts=rewards.verdicts,
        closed_by=group.closed_by,
        batch=batch,
        owner=events[0].owner if events else "",
    )


async def _ask_for_rewards(
    members: Sequence[TrajectoryCompleted], signals: Sequence[SignalGiven], config: JudgeConfig, compose: Compose | None
) -> GroupRewards:
    """Return the rewards of the members: the agents' own ones if there is no `compose`, or if `judge.rewards` is empty
    and every agent reported one; else those of `compose`. Raises `UnscoredError`."""
    of_agents = agent_rewards(members)
    all_reported = not config.rewards and len(of_agents.final) == len(members)
    if compose is None or not members or all_reported:
        return of_agents
    return await compose(members, signals)


async def with_hints_and_answers(
    rewards: GroupRewards,
    members: Sequence[TrajectoryCompleted],
    signals: Sequence[SignalGiven],
    config: JudgeConfig,
    teach: AskTeacher | None,
) -> GroupRewards:
    """Return `rewards` with the feedback of `signals` on the members, and with the teacher from outside that answered
    about them (`teach`, which is asked here).

    If the group has no reward and `judge.rewards` is empty, members with a hint or an answer get the reward 0: else
    they would be masked, and the hint or the answer could not train."""
    feedback = feedback_on(members, signals, config, rewards.feedback)
    rewards = replace(rewards, feedback=feedback)
    if teach is not None:
        rewards = replace(rewards, taught={**rewards.taught, **await teach(members)})
    if rewards.final or config.rewards:
        return rewards
    can_teach = {name for name, of_run in feedback.items() if of_run.hints} | rewards.taught.keys()
    return replace(rewards, final={e.trajectory: 0.0 for e in members if e.trajectory in can_teach})


def _too_few(usable: int, total: int, needed: int) -> str:
    """Return the detail of a discard because of too few members with a reward."""
    return f"{usable} of {total} trajectories can be scored, {needed} are needed"


def agent_rewards(members: Sequence[TrajectoryCompleted]) -> GroupRewards:
    """Return the agents' own rewards of the members that have one, with a verdict of the judge model `agent`."""
    final = {e.trajectory: r for e in members if (r := agent_reward(e)) is not None}
    components = {e.trajectory: {**e.rewards, AGENT: final[e.trajectory]} for e in members if e.trajectory in final}
    scores = tuple(Score(trajectory=t, score=r) for t, r in final.items())
    unrewarded = len(members) - len(final)
    missing = f"{unrewarded} of {len(members)} trajectories carry no reward and judge.model is not set"
    return GroupRewards(final, components, (Verdict(judge_model=AGENT, scores=scores),), missing if unrewarded else "")


def make_member(event: TrajectoryCompleted, seq: int, rewards: GroupRewards) -> Member:
    """Return the trajectory's entry in its scored group; masked if it should have a reward and has none. `seq` is the
    stream sequence of its completion."""
    unscored = event.outcome == "scored" and event.trajectory not in rewards.final
    outcome = "masked" if unscored else event.outcome
    feedback = rewards.feedback.get(event.trajectory, RunFeedback())
    return Member(
        trajectory=event.trajectory,
        reward=rewards.final[event.trajectory] if outcome == "scored" else 0.0,
        outcome=outcome,
        graded="calls" if rewards.of_calls else "run",
        split=event.split,
        components=dict(rewards.components.get(event.trajectory, event.rewards)),
        metrics=event.metrics,
        exchanges=event.exchanges,
        first_step=event.first_step,
        last_step=event.last_step,
        completed_seq=seq,
        call_rewards=dict(feedback.call_rewards),
        hints=feedback.hints,
        graded_by=feedback.graded_by,
        teacher=rewards.taught.get(event.trajectory, ""),
    )


def late_event(event: TrajectoryCompleted) -> GroupDiscarded:
    """Return the event of a trajectory that completed after its group was closed."""
    return _discarded(key_of(event), [event], "late", "its group was closed when it completed")


def _discarded(
    key: GroupKey, events: Sequence[TrajectoryCompleted], reason: DiscardReason, detail: str
) -> GroupDiscarded:
    """Return the event of a group, or of late trajectories, that get no score."""
    duration_us = max((e.at - e.opened_at for e in events if e.opened_at), default=0)
    return GroupDiscarded(
        **key._asdict(),
        trajectories=tuple(e.trajectory for e in events),
        reason=reason,
        by="judge",
        detail=detail,
        owner=events[0].owner if events else "",
        duration_s=max(duration_us, 0) / 1e6,
    )
