"""`journeywork judge score FILE`: score a group that you bring along, as the running judge would.

    journeywork judge score group.json --config journeywork.toml          # FILE may be - for standard input

The file holds a JSON object (`judge.labelled.GroupFile`), or an array of trajectories. The answer is one JSON object
on standard output. From Python, call `score_group`. No log and no running installation are needed, and nothing is
recorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec

from judge.errors import UnscoredError
from judge.labelled import GroupFile, GroupMember
from judge.rewards.compose import open_composer
from judge.ruler.transcripts import Transcript
from judge.scoring import GroupRewards, judge_hash
from pipeline.config import Config, ConfigError, load
from pipeline.events import TrajectoryCompleted
from pipeline.terminal.parsers import add_overrides
from pipeline.terminal.printing import visible_json


@dataclass(frozen=True)
class ScoredGroup:
    """A judge's result for a group."""

    judge: str
    """Hash of the judge configuration, as in `group.scored`."""
    scores: Mapping[str, float]
    """Score by trajectory id. A trajectory that could not be scored is missing, and `rewards.missing` says why."""
    rewards: GroupRewards

    def as_dict(self) -> dict[str, Any]:
        """Return the answer of the command."""
        verdicts = self.rewards.verdicts
        explanations: dict[str, list[str]] = {}
        for score in (s for v in verdicts for s in v.scores if s.explanation):
            explanations.setdefault(score.trajectory, []).append(score.explanation)
        return {
            "judge": self.judge,
            "scores": self.scores,
            "explanations": explanations,
            "components": self.rewards.components,
            "calls": {t: f.call_rewards for t, f in self.rewards.feedback.items() if f.call_rewards},
            "hints": {t: f.hints for t, f in self.rewards.feedback.items() if f.hints},
            "missing": self.rewards.missing,
            "cost_usd": sum(v.cost_usd for v in verdicts),
            "prompt_tokens": sum(v.prompt_tokens for v in verdicts),
            "completion_tokens": sum(v.completion_tokens for v in verdicts),
            "verdicts": verdicts,
        }


async def score_group(config: Config, group: GroupFile) -> ScoredGroup:
    """Judge the group once with the judge of the settings: its model and rubric, or its composed rewards.

    Raises `ConfigError` if settings or group cannot be used, `UnscoredError` if no judging gave scores."""
    if not config.judge.model and not config.judge.rewards:
        raise ConfigError("judge.model is not set: there is no judge to ask")
    transcripts = group.transcripts()
    members = [
        TrajectoryCompleted(
            project=config.project,
            trajectory=name,
            model="",
            group="",
            task=group.task,
            reward=attempt.reward,
            rewards=attempt.rewards,
            metrics=attempt.metrics,
            metadata=msgspec.json.encode(attempt.metadata),
        )
        for name, attempt in zip(transcripts, group.trajectories, strict=True)
    ]

    async def load_member(member: TrajectoryCompleted) -> Transcript:
        return transcripts[member.trajectory]

    # The caller waits for this one group and can ask again, so nothing is retried later.
    once = msgspec.structs.replace(config, judge=msgspec.structs.replace(config.judge, retry_for_s=0.0))
    failed: UnscoredError | None = None
    async with open_composer(once, load_member) as composer:
        assert composer is not None
        try:
            rewards = await composer(members)
        except UnscoredError as error:
            failed = error  # raised below, where no task group wraps it
    if failed is not None:
        raise failed
    return ScoredGroup(judge_hash(config.judge), rewards.final, rewards)


def read_group(source: str) -> GroupFile:
    """Read the group in the file `source`, or in standard input for `-`. Raises `ConfigError`."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        if text.lstrip()[:1] == b"[":
            return GroupFile(msgspec.json.decode(text, type=list[GroupMember]))
        return msgspec.json.decode(text, type=GroupFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error


def add_command(commands: Any) -> None:
    """Add `score` to the subcommands of `journeywork judge`."""
    parser = commands.add_parser("score", help="scores of one group, as JSON")
    parser.add_argument("group", help="the group, JSON; - for standard input")
    parser.add_argument("--config", default="", help="settings, TOML")
    add_overrides(parser)
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Print the answer. Raises `ConfigError`; exits 1, with the reason in the answer, if no judging gave scores."""
    config = load(args.config or None, args.overrides)
    try:
        answer, status = anyio.run(score_group, config, read_group(args.group)).as_dict(), 0
    except UnscoredError as error:
        answer, status = {"judge": judge_hash(config.judge), "scores": {}, "error": str(error)}, 1
    sys.stdout.write(visible_json(msgspec.json.encode(answer).decode()) + "\n")
    if status:
        raise SystemExit(status)
