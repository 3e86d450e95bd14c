"""The demo's report: win rates with intervals, and the SQL queries over the run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.common import curve
from examples.common.history import ask, rows
from examples.common.invariants import NEVER, counting
from journeywork.evaluation import EntrantResult, EvaluationReport
from journeywork.statistics import Estimate

MODEL = "tictactoe"
GOAL = 0.70
"""Win rate in training whose time is reported."""

LINEAGE = """
SELECT version, parent, group_id, count(DISTINCT trajectory) AS trajectories, count(*) AS exchanges,
  sum(sampled_tokens)::BIGINT AS sampled_tokens, max(staleness) AS staleness,
  string_agg(DISTINCT policy_version, ' ' ORDER BY policy_version) AS sampled_by, batch_id
FROM lineage WHERE model = '{model}' AND step = {step} GROUP BY ALL ORDER BY group_id
"""
"""From a checkpoint to the groups it learned from, and to the versions that sampled them."""

COUNTS = """
SELECT (SELECT count(*) FROM trajectories WHERE completed_at IS NOT NULL) AS completed,
  (SELECT count(DISTINCT trajectory) FROM trajectories WHERE completed_at IS NOT NULL) AS distinct_completed,
  (SELECT count(*) FROM exchanges) AS exchanges,
  (SELECT count(*) FROM checkpoints) AS checkpoints,
  (SELECT max(greatest(metrics['on_policy_logprob_diff'], metrics['sampler_logprob_diff']))
   FROM checkpoints) AS sampler_logprob_diff,
  (SELECT avg(staleness) FROM lineage) AS staleness_mean,
  (SELECT max(staleness) FROM lineage) AS staleness_max
"""


def win_rate(result: EntrantResult) -> dict[str, Any]:
    """Win rate with its interval over the batches, and how many games ended how."""
    played = [task.values for task in result.tasks if task.values]
    return {
        **_clamped(result.estimate("win"), 0.0),
        "games": round(sum(values["games"] for values in played)),
        "outcomes": {
            kind: round(sum(values[kind] * values["games"] for values in played))
            for kind in ("win", "draw", "loss", "illegal")
        },
    }


def difference(report: EvaluationReport) -> dict[str, Any]:
    """Difference of the win rates of the second entrant and the first, with its interval over the pairs of batches."""
    games = {task.task: task.values.get("games", 0.0) for task in report.entrants[0].tasks}
    paired = report.pairs(1, "win")
    return {**_clamped(report.difference(1, "win"), -1.0), "games": round(sum(games[task] for task, _, _ in paired))}


def _clamped(estimate: Estimate, least: float) -> dict[str, Any]:
    """A rate from `least` to 1. Without an interval it is anywhere."""
    known = estimate.count > 1
    return {
        "value": estimate.mean if estimate.count else 0.0,
        "ci95": [max(estimate.low, least), min(estimate.high, 1.0)] if known else [least, 1.0],
    }


def conclude(report: dict[str, Any], run_dir: Path, console: Console) -> list[str]:
    """Add what the history says to the report, print it and write it. Return what must not be in the history and is."""
    (counts,) = rows(run_dir, COUNTS)
    query = LINEAGE.format(model=MODEL, step=report["steps"])
    report |= {
        "trajectories": counts["completed"],
        "completed_by_sql": counts["completed"],
        "completed_by_sql_distinct": counts["distinct_completed"],
        "exchanges_by_sql": counts["exchanges"],
        "sampler_logprob_diff": counts["sampler_logprob_diff"],
        "staleness": {"mean": counts["staleness_mean"], "max": counts["staleness_max"]},
        "lineage": rows(run_dir, query),
        "never": {row["finding"]: row["count"] for row in rows(run_dir, counting(NEVER))},
        # What `examples.common.curve` draws.
        "training": curve.training_points(rows(run_dir, curve.GROUPS.format(value="(r.reward = 1)::DOUBLE"))),
        **{
            when: {"mean": rate["value"], "ci95": rate["ci95"], "count": rate["games"]}
            for when, rate in (("before", report["win_rate_before"]), ("after", report["win_rate_after"]))
        },
    }
    (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    console.print(f"\nlineage of [bold]{report['final_checkpoint']}[/]:")
    print(ask(run_dir, query))
    before, after = report["win_rate_before"], report["win_rate_after"]
    table = Table("", "win rate", "95 % interval", "games", "win / draw / loss / illegal", box=None)
    for name, rate in (("before", before), ("after", after)):
        low, high = rate["ci95"]
        ends = " / ".join(str(n) for n in rate["outcomes"].values())
        table.add_row(name, f"{rate['value']:.3f}", f"{low:.3f} to {high:.3f}", str(rate["games"]), ends)
    console.print(table)
    gain = report["win_rate_difference"]
    low, high = gain["ci95"]
    console.print(
        f"difference over the same {gain['games']} games: {gain['value']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}"
    )
    reached = report["time_to_0_70"]
    goal = f"reached after {reached:.0f} s of training" if reached is not None else "not reached"
    diff = report["sampler_logprob_diff"]
    console.print(
        f"{report['steps']} steps, {report['calls']:,} calls, {report['failed_requests']} failed, "
        f"{report['wall_s']:.0f} s in all; a win rate of {GOAL:.2f} while training: {goal}\n"
        f"trajectories completed: {report['completed_by_agents']:,} by the agents, {counts['completed']:,} in the "
        f"history; largest mean difference of sampler's and trainer's logprobs: "
        f"{'none measured' if diff is None else f'{diff:.1e}'}\n"
        f"report: {run_dir / 'report.json'}",
        markup=False,
    )
    findings = [f"{count:,} times {name}" for name, count in report["never"].items() if count]
    console.print(
        f"{len(report['never'])} queries for what must never be in the history: {len(findings)} with findings"
    )
    return findings
