"""`journeyman judge eval LABELLED.jsonl`: how far a judge agrees with the truth, and what that costs.

    journeyman judge eval groups.jsonl --config journeyman.toml --set judge.rubric=my.md --json

The judge is the one in the settings. The file's form is described in `judge.commands.labelled`. Exits 1 where `--min-tau` is not
reached, 2 on settings or a file that can't be used.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console

from judge.commands.labelled import LabelledGroup, agreement, read_labelled
from judge.models.chat import ChatModel
from judge.models.judge_model import open_judge_model
from judge.ruler.rubrics import load_rubric
from judge.ruler.ruler import JudgingError, LlmRuler
from judge.ruler.transcripts import Transcript
from pipeline.config import ConfigError, JudgeConfig, load
from pipeline.events import TrajectoryCompleted, Verdict


async def evaluate(config: JudgeConfig, groups: Sequence[LabelledGroup], model: ChatModel) -> dict[str, Any]:
    """Judge every group once and compare. Groups that could not be judged are counted, not guessed."""

    async def no_log(member: TrajectoryCompleted) -> Transcript:
        raise LookupError(member.trajectory)  # labelled groups bring their transcripts along

    rubric = load_rubric(config.rubric)
    ruler = LlmRuler(config, rubric, model, no_log)
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    verdicts: list[Verdict] = []
    failures: list[str] = []
    slots = anyio.CapacityLimiter(config.concurrency)

    async def one(group: LabelledGroup) -> None:
        async with slots:
            try:
                scores, said = await ruler.judge(group.transcripts)
            except JudgingError as error:
                failures.append(f"{group.id}: {error}")
                return
            pairs.append((dict(group.rewards), scores))
            verdicts.extend(said)

    began = time.monotonic()
    async with anyio.create_task_group() as tg:
        for group in groups:
            tg.start_soon(one, group)
    took = time.monotonic() - began
    latencies = sorted(v.latency_s for v in verdicts) or [0.0]
    return {
        "judge": config.model,
        "rubric": rubric.name,
        "rubric_hash": rubric.hash,
        **asdict(agreement(pairs)),
        "failed": len(failures),
        "failures": failures[:20],
        **{k: v for k, v in ruler.measured.as_dict().items() if k != "groups"},
        "cost_usd_per_group": ruler.measured.cost_usd / max(len(pairs), 1),
        "latency_p50_s": latencies[len(latencies) // 2],
        "latency_p95_s": latencies[int(len(latencies) * 0.95)] if len(latencies) > 1 else latencies[0],
        "wall_s": took,
    }


async def _run(config: JudgeConfig, groups: Sequence[LabelledGroup]) -> dict[str, Any]:
    async with open_judge_model(config) as model:
        return await evaluate(config, groups, model)


def add_command(commands: Any) -> None:
    """Add `eval` to the subcommands of `journeyman judge`."""
    parser = commands.add_parser("eval", help="agreement with a labelled set")
    parser.add_argument("data", type=Path, help="labelled groups, JSONL")
    parser.add_argument("--config", help="settings, TOML")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    parser.add_argument("--limit", type=int, default=0, help="only so many groups")
    parser.add_argument("--min-tau", type=float, default=None, help="exit 1 below this Kendall tau")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> None:
    """`journeyman judge eval`. Raises `ConfigError`; exits 1 where the bound is not reached."""
    config = load(args.config, args.overrides).judge
    if not config.model:
        raise ConfigError("judge.model is not set: there is no judge to measure")
    groups = read_labelled(args.data)
    report = anyio.run(_run, config, groups[: args.limit] if args.limit else groups)
    console = Console(highlight=False)
    if args.json:
        console.print_json(msgspec.json.encode(report).decode())
    else:
        for key, value in report.items():
            console.print(f"{key:<22} {value:.4g}" if isinstance(value, float) else f"{key:<22} {value}")
    if report["groups"] == 0 or (args.min_tau is not None and report["kendall_tau"] < args.min_tau):
        raise SystemExit(1)
