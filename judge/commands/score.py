"""`journeyman judge score FILE`: score one group that you bring along, as the running judge would.

    journeyman judge score group.json --config journeyman.toml          # FILE may be - for standard input

The file holds one JSON object, or an array of trajectories alone:

    {"task": "…", "messages": [what all share], "tools": [],
     "trajectories": [{"id": "a", "messages": [what this one said]}, {"id": "b", "conversations": [[…], […]]}]}

`messages` or `conversations` (each with what all share before it in the first one) say what a trajectory did; `reward`, `rewards`,
`metrics` and `metadata` are for composed rewards. The answer is one JSON object on standard output. From Python, `score_group`
does the same. No log and no running installation are needed, and nothing is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from judge.rewards.compose import open_composed
from judge.ruler.conversations import Conversation
from judge.ruler.transcripts import Transcript
from judge.scoring import Scores, UnscoredError, judge_hash
from pipeline.config import Config, ConfigError
from pipeline.events import TrajectoryCompleted


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trajectory of a group to score."""

    id: str = ""
    messages: list[dict[str, Any]] = []
    conversations: list[list[dict[str, Any]]] = []
    """Instead of `messages`, where an agent had several: with sub-agents, or from before and after its history was shortened."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    metadata: dict[str, Any] = {}


class GroupToScore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Trajectories to compare with each other."""

    trajectories: list[Attempt]
    task: str = ""
    messages: list[dict[str, Any]] = []
    """What all of them begin with."""
    tools: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Scored:
    """What a judge said of a group."""

    judge: str
    """Hash of the judge configuration, as in `group.scored`."""
    scores: Mapping[str, float]
    """By id. One that could not be scored is not in it, and `missing` says why."""
    scored: Scores

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verdicts = self.scored.verdicts
        why: dict[str, list[str]] = {}
        for score in (s for v in verdicts for s in v.scores if s.explanation):
            why.setdefault(score.trajectory, []).append(score.explanation)
        return {
            "judge": self.judge,
            "scores": self.scores,
            "explanations": why,
            "components": self.scored.components,
            "missing": self.scored.missing,
            "cost_usd": sum(v.cost_usd for v in verdicts),
            "prompt_tokens": sum(v.prompt_tokens for v in verdicts),
            "completion_tokens": sum(v.completion_tokens for v in verdicts),
            "verdicts": verdicts,
        }


async def score_group(config: Config, group: GroupToScore) -> Scored:
    """Judge the group once with the judge of the settings: its model and rubric, or its composed rewards.

    Raises `ConfigError` where settings or group can't be used, `UnscoredError` where no judging could be read."""
    if not config.judge.model and not config.judge.rewards:
        raise ConfigError("judge.model is not set: there is no judge to ask")
    transcripts = _transcripts(group)
    members = [
        TrajectoryCompleted(
            project=config.project, trajectory=name, model="", group="", task=group.task, reward=attempt.reward,
            rewards=attempt.rewards, metrics=attempt.metrics, metadata=msgspec.json.encode(attempt.metadata),
        )
        for name, attempt in zip(transcripts, group.trajectories, strict=True)
    ]  # fmt: skip

    async def load(member: TrajectoryCompleted) -> Transcript:
        return transcripts[member.trajectory]

    # A caller waits for this one group and can ask again; the running judge has an hour for each.
    once = msgspec.structs.replace(config, judge=msgspec.structs.replace(config.judge, retry_for_s=0.0))
    failed: UnscoredError | None = None
    async with open_composed(once, load) as composed:
        assert composed is not None
        try:
            scored = await composed(members)
        except UnscoredError as error:
            failed = error  # raised outside, where no task group wraps it
    if failed is not None:
        raise failed
    return Scored(judge_hash(config.judge), scored.final, scored)


def _transcripts(group: GroupToScore) -> dict[str, Transcript]:
    """By id; `1`, `2`, … where a trajectory brings none. Raises `ConfigError`."""
    found: dict[str, Transcript] = {}
    tools = tuple(group.tools)
    for number, attempt in enumerate(group.trajectories, 1):
        name = attempt.id or str(number)
        if name in found:
            raise ConfigError(f"two trajectories have the id {name!r}")
        if attempt.messages and attempt.conversations:
            raise ConfigError(f"trajectory {name}: give messages or conversations, not both")
        lines = attempt.conversations or [attempt.messages]
        lines = [[*group.messages, *lines[0]], *lines[1:]]
        parts = tuple(Conversation(tuple(line), tools, f"part {i}") for i, line in enumerate(lines, 1))
        found[name] = Transcript(name, parts[-1].messages, tools, parts if len(parts) > 1 else ())
    if len(found) < 2:
        raise ConfigError("a group needs at least 2 trajectories, because they are compared with each other")
    return found


def read_group(source: str) -> GroupToScore:
    """The group in a file, or in standard input for `-`. Raises `ConfigError`."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from error
    try:
        if text.lstrip()[:1] == b"[":
            return GroupToScore(msgspec.json.decode(text, type=list[Attempt]))
        return msgspec.json.decode(text, type=GroupToScore)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error


async def run(config: Config, source: str) -> tuple[dict[str, Any], int]:
    """The command's answer and exit status."""
    try:
        return (await score_group(config, read_group(source))).as_dict(), 0
    except UnscoredError as error:
        return {"judge": judge_hash(config.judge), "scores": {}, "error": str(error)}, 1
