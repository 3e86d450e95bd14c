"""Rewards of several parts: what agents reported, functions of yours, and RULER with one rubric or several.

Every part is kept under its name in the member's `components`. A trajectory for which one part can't be had (the agent
reported none, the function failed) has no reward: a failure never counts as a bad score.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec

from judge.models.chat import ChatModel
from judge.models.judge_model import open_judge_model
from judge.rewards.sandbox import RewardFunction, RewardFunctionError
from judge.ruler.rubrics import load_rubric
from judge.ruler.ruler import LlmRuler, Load
from judge.ruler.transcripts import Transcript, load
from judge.scoring import AGENT, Scores, UnscoredError, agent_reward, judge_hash
from pipeline.config import Config, JudgeConfig, RewardConfig
from pipeline.events import GroupScored, Score, TrajectoryCompleted, Verdict
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.log.subjects import stream_of
from pipeline.telemetry.logs import get_logger

log = get_logger("judge.rewards.compose")

_RECALLED = 1000
"""Messages of the groups' stream that a starting judge looks back."""

Part = tuple[Mapping[str, float], tuple[Verdict, ...]]


class Composed:
    """Rewards as the settings compose them."""

    def __init__(
        self,
        config: JudgeConfig,
        rulers: Mapping[str, LlmRuler],
        functions: Mapping[str, RewardFunction],
        load: Load,
    ) -> None:
        """`rulers` by the name of their reward (`""`: the default one), `functions` likewise."""
        self._config, self.rulers, self._functions, self._load = config, rulers, functions, load

    async def __call__(self, members: Sequence[TrajectoryCompleted]) -> Scores:
        if not self._config.rewards:
            final, verdicts = await self.rulers[""](members)
            components = {m.trajectory: {**_reported(m), "ruler": final[m.trajectory]} for m in members}
            return Scores(final, components, verdicts)
        parts: dict[str, Part] = {}
        async with anyio.create_task_group() as tg:
            for reward in self._config.rewards:
                tg.start_soon(self._part, reward, members, parts)
        if failed := [str(p) for p in parts.values() if isinstance(p, UnscoredError)]:
            raise UnscoredError(failed[0])
        return self._compose(members, parts)

    async def _part(
        self, reward: RewardConfig, members: Sequence[TrajectoryCompleted], parts: dict[str, Any]
    ) -> None:
        try:
            match reward.kind:
                case "ruler":
                    parts[reward.name] = await self.rulers[reward.name](members)
                case "python":
                    parts[reward.name] = await self._function(reward, members)
                case "metric":
                    parts[reward.name] = _verdict(
                        reward, {m.trajectory: m.metrics.get(reward.name) for m in members}
                    )
                case "agent":
                    found = {m.trajectory: m.rewards.get(reward.name, agent_reward(m)) for m in members}
                    parts[reward.name] = _verdict(reward, found)
        except UnscoredError as error:
            parts[reward.name] = error

    async def _function(self, reward: RewardConfig, members: Sequence[TrajectoryCompleted]) -> Part:
        function = self._functions[reward.name]
        found: dict[str, float | None] = {}

        async def one(member: TrajectoryCompleted) -> None:
            try:
                transcript = await self._load(member)
                found[member.trajectory] = await function(
                    {
                        "id": member.trajectory,
                        "group": member.group,
                        "task": member.task,
                        "messages": transcript.messages,
                        "conversations": [c.messages for c in transcript.parts()],
                        "tools": transcript.tools,
                        "reward": member.reward,
                        "rewards": member.rewards,
                        "metrics": member.metrics,
                        "metadata": msgspec.json.decode(member.metadata),
                    }
                )
            except (RewardFunctionError, HistoryGoneError, msgspec.DecodeError) as error:
                log.error(
                    "reward function failed",
                    reward=reward.name,
                    trajectory=member.trajectory,
                    reason=str(error),
                )

        async with anyio.create_task_group() as tg:
            for member in members:
                tg.start_soon(one, member)
        return _verdict(reward, {m.trajectory: found.get(m.trajectory) for m in members})

    def _compose(self, members: Sequence[TrajectoryCompleted], parts: Mapping[str, Part]) -> Scores:
        names = [r.name for r in self._config.rewards]
        final: dict[str, float] = {}
        components: dict[str, dict[str, float]] = {}
        for member in members:
            have = {n: parts[n][0][member.trajectory] for n in names if member.trajectory in parts[n][0]}
            components[member.trajectory] = {**_reported(member), **have}
            if len(have) == len(names):
                final[member.trajectory] = combine(self._config, have)
        lacking = {n: len(members) - len(parts[n][0]) for n in names}
        return Scores(
            final,
            components,
            tuple(v for n in names for v in parts[n][1]),
            "; ".join(f"reward {n} is missing for {c} of {len(members)}" for n, c in lacking.items() if c),
        )


def _reported(member: TrajectoryCompleted) -> dict[str, float]:
    own = agent_reward(member)
    return {**member.rewards, **({AGENT: own} if own is not None else {})}


def _verdict(reward: RewardConfig, found: Mapping[str, float | None]) -> Part:
    """A part that no model judged, as a verdict: `agent`, `metric:name` or `python:entry`."""
    known = {t: s for t, s in found.items() if s is not None and math.isfinite(s)}
    source = {"agent": AGENT, "metric": f"metric:{reward.name}"}.get(reward.kind, f"python:{reward.entry}")
    scores = tuple(Score(trajectory=t, score=s) for t, s in known.items())
    return known, (Verdict(judge_model=source, rubric=reward.name, scores=scores),)


def combine(config: JudgeConfig, parts: Mapping[str, float]) -> float:
    """One reward of its parts, as `judge.combine` says; weights do not count for `product` and `min`."""
    weights = {r.name: r.weight for r in config.rewards}
    match config.combine:
        case "product":
            return math.prod(parts.values())
        case "min":
            return min(parts.values())
        case "sum":
            return math.fsum(weights[n] * v for n, v in parts.items())
        case "mean":
            total = math.fsum(abs(weights[n]) for n in parts)
            return math.fsum(weights[n] * v for n, v in parts.items()) / total if total else 0.0


def make_rulers(config: JudgeConfig, model: ChatModel, load: Load) -> dict[str, LlmRuler]:
    """One for each rubric in use."""
    wanted = {r.name: r.rubric or config.rubric for r in config.rewards if r.kind == "ruler"}
    if not config.rewards:
        wanted = {"": config.rubric}
    return {name: LlmRuler(config, load_rubric(rubric), model, load) for name, rubric in wanted.items()}


async def recall(broker: Broker, config: Config, rulers: Mapping[str, LlmRuler]) -> None:
    """Let rulers learn from what this judge configuration scored last."""
    newest = (await broker.stream_info(stream_of(GroupScored))).state.last_seq
    judge = judge_hash(config.judge)
    recent = await broker.read(GroupScored, start_seq=max(1, newest - _RECALLED), project=config.project)
    for event in (recorded.event for recorded in recent):
        if (event.branch, event.judge) == ("main", judge):
            for ruler in rulers.values():
                ruler.recall(event.verdicts)


@asynccontextmanager
async def open_composed(config: Config, read: Load) -> AsyncIterator[Composed | None]:
    """What the settings say beyond agents' own rewards; None where they say nothing. `read` gives a member's transcript.
    Imports litellm only for a model.

    Raises `ConfigError` for a rubric or key that is missing."""
    judge = config.judge
    if not judge.model and not judge.rewards:
        yield None
        return
    async with AsyncExitStack() as stack:
        functions = {
            r.name: await stack.enter_async_context(RewardFunction(r, (config.run_dir,)).open())
            for r in judge.rewards
            if r.kind == "python"
        }
        rulers: dict[str, LlmRuler] = {}
        if judge.model and (not judge.rewards or any(r.kind == "ruler" for r in judge.rewards)):
            rulers = make_rulers(judge, await stack.enter_async_context(open_judge_model(judge)), read)
        yield Composed(judge, rulers, functions, read)


@asynccontextmanager
async def open_composer(config: Config, broker: Broker) -> AsyncIterator[Composed | None]:
    """`open_composed` over the log: members are read from it, and rulers remember what this judge scored last."""

    async def read(member: TrajectoryCompleted) -> Transcript:
        return await load(broker, member.project, member.trajectory, member.exchanges)

    async with open_composed(config, read) as composed:
        if composed is not None and composed.rulers:
            await recall(broker, config, composed.rulers)
        yield composed
