"""`journeywork judge score FILE`: score a group that you bring along, as the running judge would.

    journeywork judge score group.json --config journeywork.toml          # FILE may be - for standard input

The file holds a JSON object (`judge.labelled.GroupFile`). The answer is one JSON object on standard output. From
Python, call `score_group`. No log and no running installation are needed, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec

from judge.errors import UnscoredError
from judge.labelled import GroupFile
from judge.rewards.compose import open_composer
from judge.ruler.transcripts import Transcript
from judge.scoring import GroupRewards, judge_hash
from pipeline.config import Config, ConfigError, load
from pipeline.events import TrajectoryCompleted
from pipeline.terminal.parsers import add_overrides
from pipeline.terminal.printing import visible_json


async def score_group(config: Config, group: GroupFile) -> GroupRewards:
    """Judge the group once with the judge of the settings: its model and rubric, or its composed rewards. A trajectory
    that could not be scored is not in `final`, and `missing` says why.

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
    async with open_composer(once, load_member) as composer:
        assert composer is not None
        return await composer(members)


def answer_of(config: Config, rewards: GroupRewards) -> dict[str, Any]:
    """Return the answer of the command about a scored group. `judge` in it is the hash of the judge configuration, as
    in `group.scored`."""
    verdicts = rewards.verdicts
    explanations: dict[str, list[str]] = {}
    for score in (s for v in verdicts for s in v.scores if s.explanation):
        explanations.setdefault(score.trajectory, []).append(score.explanation)
    return {
        "judge": judge_hash(config.judge),
        "scores": rewards.final,
        "explanations": explanations,
        "components": rewards.components,
        "calls": {t: f.call_rewards for t, f in rewards.feedback.items() if f.call_rewards},
        "hints": {t: f.hints for t, f in rewards.feedback.items() if f.hints},
        "missing": rewards.missing,
        "cost_usd": sum(v.cost_usd for v in verdicts),
        "prompt_tokens": sum(v.prompt_tokens for v in verdicts),
        "completion_tokens": sum(v.completion_tokens for v in verdicts),
        "verdicts": verdicts,
    }


def read_group(source: str) -> GroupFile:
    """Read the group in the file `source`, or in standard input for `-`. Raises `ConfigError`."""
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
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
        answer = answer_of(config, anyio.run(score_group, config, read_group(args.group)))
    except UnscoredError as error:
        answer = {"judge": judge_hash(config.judge), "scores": {}, "error": str(error)}
    sys.stdout.write(visible_json(msgspec.json.encode(answer).decode()) + "\n")
    if "error" in answer:
        raise SystemExit(1)
