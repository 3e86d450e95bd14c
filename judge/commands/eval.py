"""`journeywork judge eval LABELLED.jsonl`: how well a judge agrees with known rewards, and what that costs.

    journeywork judge eval groups.jsonl --config journeywork.toml --set judge.rubric=my.md --json

The judge is that of the settings; `--reward NAME` measures one of `judge.rewards`, also the judge of what happened
next, by the mean score of a run's calls. docs/judging.md describes the file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import msgspec

from judge.labelled import LabelledGroup, measure_agreement, read_labelled
from judge.models.chat import ChatModel
from judge.models.judge_model import open_judge_model
from judge.rewards.compose import RULER, make_judge
from judge.ruler.asking import JudgingError
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import ConfigError, JudgeConfig, RewardConfig, load
from pipeline.events import Verdict
from pipeline.terminal.parsers import add_overrides
from pipeline.terminal.printing import visible, visible_json


async def evaluate(
    config: JudgeConfig, groups: Sequence[LabelledGroup], model: ChatModel, reward: RewardConfig = RULER
) -> dict[str, Any]:
    """Judge every group once and return the report: agreement with the known rewards, cost and time. Groups that could
    not be judged are counted and left out of the averages. `reward`: a reward of kind `ruler` or `next_state`."""
    ruler = make_judge(config, reward, model)
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    verdicts: list[Verdict] = []
    failures: list[str] = []

    async def judge(group: LabelledGroup) -> None:
        try:
            scores, group_verdicts = await ruler.judge(group.transcripts)
        except JudgingError as error:
            failures.append(f"{group.id}: {error}")
            return
        pairs.append((dict(group.rewards), scores))
        verdicts.extend(group_verdicts)

    began = time.monotonic()
    await concurrently(judge, groups, config.concurrency)
    latencies = sorted(v.latency_s for v in verdicts) or [0.0]
    return {
        "judge": config.model,
        "rubric": ruler.rubric.name,
        "rubric_hash": ruler.rubric.hash,
        **ruler.statistics.measured_fields(),
        "failed_judgings": ruler.statistics.failed_judgings,  # passes; `failed` counts groups
        **asdict(measure_agreement(pairs)),
        "failed": len(failures),
        "failures": failures[:20],
        "cost_usd_per_group": ruler.statistics.usage.cost_usd / max(len(pairs), 1),
        "latency_p50_s": latencies[len(latencies) // 2],
        "latency_p95_s": latencies[int(len(latencies) * 0.95)],
        "wall_s": time.monotonic() - began,
    }


def add_command(commands: Any) -> None:
    """Add `eval` to the subcommands of `journeywork judge`."""
    parser = commands.add_parser("eval", help="agreement with known rewards")
    parser.add_argument("data", type=Path, help="groups with rewards, JSONL")
    parser.add_argument("--config", default="", help="settings, TOML")
    add_overrides(parser)
    parser.add_argument("--reward", default="", help="a reward of kind ruler or next_state in judge.rewards")
    parser.add_argument("--min-tau", type=float, default=None, help="exit 1 below this Kendall tau")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Print the report. Raises `ConfigError`; exits 1 if no group could be judged or `--min-tau` is not reached."""
    config = load(args.config or None, args.overrides).judge
    if not config.model:
        raise ConfigError("judge.model is not set: there is no judge to measure")
    judged = {r.name: r for r in config.rewards if r.kind in ("ruler", "next_state")}
    if args.reward and args.reward not in judged:
        raise ConfigError(
            f"--reward: {args.reward!r} is no reward of kind ruler or next_state; there are: "
            f"{', '.join(judged) or 'none'}"
        )
    groups = read_labelled(args.data)

    async def run() -> dict[str, Any]:
        return await evaluate(config, groups, await open_judge_model(config), judged.get(args.reward, RULER))

    report = anyio.run(run)
    if args.json:
        sys.stdout.write(visible_json(msgspec.json.encode(report).decode()) + "\n")
    else:
        for key, value in report.items():
            figure = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
            sys.stdout.write(visible(f"{key:<22} {figure}\n"))
    tau = report["kendall_tau"]
    if report["groups"] == 0 or (args.min_tau is not None and (tau is None or tau < args.min_tau)):
        raise SystemExit(1)
