"""Rewards of several parts: agents' own rewards, metrics, penalties, Python functions, feedback, RULER and the judge of
what happened next, each with one rubric or several.

`ConfiguredComposer` is what the judge service, `rejudge` and `judge score` call to score the members of a group. Every
part is kept under its name in the member's `components`. A trajectory that lacks a part (its agent reported none, the
function failed) has no reward: a failure never counts as a low score.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import msgspec

from judge.feedback import RunFeedback, feedback_value, merge_feedback, signals_by_run
from judge.models.chat import ChatModel
from judge.models.judge_model import open_judge_model
from judge.next_state import NextStateJudge
from judge.reward_parts import combine, is_usable
from judge.rewards.sandbox import FunctionReward, RewardFunction, RewardFunctionError
from judge.ruler.asking import LoadTranscript, no_log
from judge.ruler.rubrics import rubric_of
from judge.ruler.ruler import LlmRuler
from judge.ruler.transcripts import Transcript, load_transcript
from judge.scoring import AGENT, GroupRewards, agent_reward
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config, JudgeConfig, RewardConfig
from pipeline.events import Score, SignalGiven, TrajectoryCompleted, Verdict
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.rewards.compose")

_LEAST_JUDGED, _WITHOUT_JUDGE = 8, 256
"""Groups that a process scores at once: the least number with a judge model, and the number without one. A group that
one process holds can't be scored by another one."""
RULER = RewardConfig(name="ruler", kind="ruler")
"""The one part of the rewards where `judge.rewards` is empty and there is a judge model."""

Judges = Mapping[str, LlmRuler | NextStateJudge]
"""All that ask the judge model, by the name of their reward."""


class Component(NamedTuple):
    """One part of the rewards."""

    values: Mapping[str, float]
    """Its value by trajectory."""
    verdicts: tuple[Verdict, ...]
    """The verdicts behind it."""
    feedback: Mapping[str, RunFeedback] = {}
    """Rewards of single calls and hints, by trajectory."""


class ConfiguredComposer:
    """Scores the members of a group by the settings."""

    def __init__(
        self, config: JudgeConfig, judges: Judges, functions: Mapping[str, RewardFunction], load: LoadTranscript
    ) -> None:
        """`judges` and `functions` are given by the name of their reward in `config`. `load` returns what a member
        said."""
        self._config, self.judges, self._functions, self._load = config, judges, functions, load

    @property
    def at_once(self) -> int:
        """How many groups to score at once: twice as many as the judge model is asked about, so that it never idles,
        and at least `_LEAST_JUDGED`; `_WITHOUT_JUDGE` without a judge model."""
        return max(2 * self._config.concurrency, _LEAST_JUDGED) if self.judges else _WITHOUT_JUDGE

    @property
    def paused(self) -> int:
        """How many of its groups pause before they are tried again."""
        return max((judge.paused for judge in self.judges.values()), default=0)

    async def __call__(
        self, members: Sequence[TrajectoryCompleted], signals: Sequence[SignalGiven] = ()
    ) -> GroupRewards:
        """Return the rewards of a group's members by the settings. `signals`: those about the members, in the order of
        the log. Raises `UnscoredError` if a judge model is needed and gives no scores."""
        components = await concurrently(lambda r: self._component(r, members, signals), self._config.rewards)
        return self._compose(members, dict(zip((r.name for r in self._config.rewards), components, strict=True)))

    async def _component(
        self, reward: RewardConfig, members: Sequence[TrajectoryCompleted], signals: Sequence[SignalGiven]
    ) -> Component:
        """Return one part of the rewards of all members, computed as its kind says. Raises `UnscoredError` if it is the
        judge model's and that gives no scores."""
        feedback: dict[str, RunFeedback] = {}
        values: dict[str, float | None]
        match reward.kind:
            case "ruler" | "next_state":
                judge = self.judges[reward.name]
                if isinstance(judge, LlmRuler):
                    return Component(*await judge(members))
                runs = await judge(members)
                means = {t: run.mean for t, run in runs.items() if run.mean is not None}
                verdicts = tuple(verdict for run in runs.values() for verdict in run.verdicts)
                return Component(means, verdicts, {t: run.feedback for t, run in runs.items()})
            case "python":
                source, returned = f"python:{reward.entry}", await self._call_function(reward, members)
                values = {t: r.reward for t, r in returned.items()}
                feedback = {t: RunFeedback(r.calls) for t, r in returned.items() if r.calls}
            case "metric":
                source = f"metric:{reward.name}"
                values = {m.trajectory: m.metrics.get(reward.name) for m in members}
            case "length" | "turns" | "context":
                source = f"penalty:{reward.kind}"
                values = {m.trajectory: _penalty(reward, m) for m in members}
            case "feedback":
                source, signals_of = f"feedback:{reward.name}", signals_by_run(signals)
                values = {m.trajectory: feedback_value(signals_of.get(m.trajectory, ()), reward) for m in members}
            case "agent":
                source = AGENT
                values = {m.trajectory: m.rewards.get(reward.name, m.reward) for m in members}
        usable = {t: v for t, v in values.items() if is_usable(v)}
        scores = tuple(Score(trajectory=t, score=v) for t, v in usable.items())
        return Component(usable, (Verdict(judge_model=source, rubric=reward.name, scores=scores),), feedback)

    async def _call_function(
        self, reward: RewardConfig, members: Sequence[TrajectoryCompleted]
    ) -> dict[str, FunctionReward]:
        """Return what the Python function of a reward returned for each member, by trajectory. A member for which it
        failed, or whose calls the log no longer holds, is missing. Raises `BrokerError` if the log can't be read."""

        async def call(member: TrajectoryCompleted) -> FunctionReward | None:
            """Return what the function returned for a member; `None`, and log why, if it failed."""
            try:
                transcript = await self._load(member)
                returned = await self._functions[reward.name](_function_argument(member, transcript))
                call_numbers = {str(reply.call) for c in transcript.conversations for reply in c.replies}
                if unknown := sorted(returned.calls.keys() - call_numbers):
                    raise RewardFunctionError(
                        f"{reward.entry} gave rewards to {len(unknown)} calls that are none of the trajectory's `calls`"
                    )
                return returned
            except (RewardFunctionError, HistoryGoneError, msgspec.DecodeError) as error:
                reason = f"reward function {reward.name} failed: {error}"
                logger.error(reason, trajectory=member.trajectory)
                return None

        results = zip((m.trajectory for m in members), await concurrently(call, members), strict=True)
        return {trajectory: returned for trajectory, returned in results if returned is not None}

    def _compose(self, members: Sequence[TrajectoryCompleted], parts: Mapping[str, Component]) -> GroupRewards:
        """Return the rewards of the members, combined of `parts`, which are given by the names of `judge.rewards`. A
        member that lacks one has no reward; `missing` of the result says how many members lack which part."""
        rewards = self._config.rewards
        # A judge of what happened next gives rewards to calls. They are no part of the run's own reward.
        names = [r.name for r in rewards if r.kind != "next_state"]
        of_calls = [r.name for r in rewards if r.kind == "next_state"]
        final: dict[str, float] = {}
        components: dict[str, dict[str, float]] = {}
        lacking = {f"reward {n} is missing": len(members) - len(parts[n].values) for n in names}
        lacking |= {f"{n} could not be judged": len(members) - len(parts[n].feedback) for n in of_calls}
        if not names:
            lacking["no call has a follow-up"] = 0
        for member in members:
            run = member.trajectory
            values = {n: parts[n].values[run] for n in (*names, *of_calls) if run in parts[n].values}
            of_run = {n: values[n] for n in names if n in values}
            components[run] = {**_reported(member), **values}
            if len(of_run) < len(names) or any(run not in parts[n].feedback for n in of_calls):
                continue
            if not values:
                lacking["no call has a follow-up"] += 1
            elif is_usable(reward := combine(self._config, of_run) if of_run else 0.0):
                final[run] = reward
            else:
                too_large = f"the {self._config.combine} of the rewards is too large"
                lacking[too_large] = lacking.get(too_large, 0) + 1
        missing = "; ".join(f"{what} for {c} of {len(members)}" for what, c in lacking.items() if c)
        verdicts = tuple(v for r in rewards for v in parts[r.name].verdicts)
        feedback = {m.trajectory: merge_feedback(self._feedback_of_parts(m.trajectory, parts)) for m in members}
        return GroupRewards(final, components, verdicts, missing, feedback, of_calls=not names)

    def _feedback_of_parts(self, trajectory: str, parts: Mapping[str, Component]) -> Iterator[RunFeedback]:
        """Yield the feedback of each part on a run, with the rewards of calls times the part's weight."""
        for reward in self._config.rewards:
            if feedback := parts[reward.name].feedback.get(trajectory):
                weighted = {call: reward.weight * number for call, number in feedback.call_rewards.items()}
                yield replace(feedback, call_rewards=weighted)


def _penalty(reward: RewardConfig, member: TrajectoryCompleted) -> float:
    """Return the penalty of a run for what its reward's `kind` counts: 0 up to `reward.free`, -1 from `reward.limit`
    on, and linear between them. For lengths this is the penalty of DAPO (arXiv 2503.14476, equation 13)."""
    amounts = {"length": member.sampled_tokens, "turns": member.calls, "context": member.prompt_tokens}
    over = (amounts[reward.kind] - reward.free) / (reward.limit - reward.free)
    return -min(max(over, 0.0), 1.0)


def _function_argument(member: TrajectoryCompleted, transcript: Transcript) -> dict[str, object]:
    """Return the argument of a reward function: the trajectory as a dict (docs/judging.md). Raises
    `msgspec.DecodeError` if the metadata is no JSON."""
    return {
        "id": member.trajectory,
        "group": member.group,
        "task": member.task,
        "messages": transcript.last_conversation.messages,
        "conversations": [c.messages for c in transcript.conversations],
        "calls": [
            {"call": r.call, "role": r.role, "conversation": n, "message": r.place, "follow_up": c.follow_up(r)}
            for n, c in enumerate(transcript.conversations)
            for r in c.replies
        ],
        "tools": transcript.last_conversation.tools,
        "reward": member.reward,
        "rewards": member.rewards,
        "metrics": member.metrics,
        "metadata": msgspec.json.decode(member.metadata),
    }


def _reported(member: TrajectoryCompleted) -> dict[str, float]:
    """Return the rewards that the agent itself reported, by name; the reward of the run as `agent`."""
    reward = agent_reward(member)
    return {**member.rewards, **({AGENT: reward} if reward is not None else {})}


def make_judge(
    config: JudgeConfig, reward: RewardConfig, model: ChatModel, load: LoadTranscript = no_log
) -> LlmRuler | NextStateJudge:
    """Return the judge of a reward of kind `ruler` or `next_state`, which asks `model` with the reward's rubric. `load`
    returns a member's transcript. Raises `ConfigError` if the rubric can't be read."""
    rubric = rubric_of(reward, config)
    if reward.kind == "next_state":
        return NextStateJudge(config, reward.votes, rubric, model, load)
    return LlmRuler(config, rubric, model, load)


@asynccontextmanager
async def open_composer(config: Config, load: LoadTranscript) -> AsyncIterator[ConfiguredComposer | None]:
    """Open the composer of the settings' rewards; `None` if only agents' own rewards are used. `load` returns a
    member's transcript.

    Raises `ConfigError` if a rubric, a key or a required sandbox is missing, or a function can't be imported."""
    judge = config.judge
    if judge.model and not judge.rewards:
        judge = judge.replace(rewards=(RULER,))
    if not judge.rewards:
        yield None
        return
    async with AsyncExitStack() as stack:
        functions = {
            r.name: await stack.enter_async_context(RewardFunction(r, (config.run_dir,)).open())
            for r in judge.rewards
            if r.kind == "python"
        }
        judges: Judges = {}
        if judged := [r for r in judge.rewards if r.kind in ("ruler", "next_state")]:
            model = await open_judge_model(judge)
            judges = {r.name: make_judge(judge, r, model, load) for r in judged}
        yield ConfiguredComposer(judge, judges, functions, load)


@asynccontextmanager
async def open_composer_on_log(config: Config, broker: Broker) -> AsyncIterator[ConfiguredComposer | None]:
    """Open the composer of the settings' rewards for members on the log, from which transcripts are read; as
    `open_composer`."""

    async def load(member: TrajectoryCompleted) -> Transcript:
        return await load_transcript(broker, member.project, member.trajectory, member.exchanges)

    async with open_composer(config, load) as composer:
        yield composer
