"""The demo's report: win rates with intervals, and the SQL queries over the run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.common import curve
from examples.common.history import ask, rows
from examples.common.invariants import NEVER, counting
from journeywork.evaluation import EntrantResult, EvaluationReport, text_report

MODEL = "tictactoe"

LINEAGE = """
SELECT version, parent, group_id, count(DISTINCT trajectory) AS trajectories, count(*) AS exchanges,
  sum(sampled_tokens)::BIGINT AS sampled_tokens, max(staleness) AS staleness,
  string_agg(DISTINCT policy_version, ' ' ORDER BY policy_version) AS sampled_by, batch_id
FROM lineage WHERE model = '{model}' AND step = {step} GROUP BY ALL ORDER BY group_id
"""
"""From a checkpoint to the groups it learned from, and to the versions that sampled them."""


def win_rate(result: EntrantResult) -> dict[str, Any]:
    """Win rate with its interval over the batches, and the number of games."""
    games = sum(task.values.get("games", 0.0) for task in result.tasks)
    return curve.as_json(result.estimate("win")) | {"count": round(games)}


def conclude(compared: EvaluationReport, report: dict[str, Any], run_dir: Path) -> list[str]:
    """Add to the report what the held-out games of base and last version and the history say, print it and write it.
    Return what must not be in the history and is."""
    before, after = compared.entrants
    lineage = LINEAGE.format(model=MODEL, step=report["steps"])
    report |= {
        "evaluation": compared.id,
        "before": win_rate(before),
        "after": win_rate(after),
        "difference": curve.as_json(compared.difference(1, "win")),
        "calls": rows(run_dir, "SELECT count(*) AS calls FROM exchanges")[0]["calls"],
        "lineage": rows(run_dir, lineage),
        "never": {row["finding"]: row["count"] for row in rows(run_dir, counting(NEVER))},
        # What `examples.common.curve` draws.
        "training": curve.training_points(rows(run_dir, curve.GROUPS.format(value="(r.reward = 1)::DOUBLE"))),
    }
    (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"\nlineage of {after.version}:")
    print(ask(run_dir, lineage))
    print(text_report(compared))
    findings = [f"{count:,} times {name}" for name, count in report["never"].items() if count]
    print(
        f"{report['steps']} steps, {report['calls']:,} calls, {report['failed_runs']} runs failed, "
        f"{report['wall_s']:.0f} s in all; {len(findings)} of {len(NEVER)} checks of the history have findings\n"
        f"report: {run_dir / 'report.json'}"
    )
    return findings
