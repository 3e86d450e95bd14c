"""The demo's report: win rates with intervals, and the SQL queries over the run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.common import curve
from examples.common.history import ask, rows
from examples.common.invariants import NEVER, count_findings, require_none
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
    """Return an entrant's win rate with its interval over the batches, and the number of games."""
    games = sum(task.values.get("games", 0.0) for task in result.tasks)
    return curve.as_json(result.estimate("win")) | {"count": round(games)}


def conclude(compared: EvaluationReport, report: dict[str, Any], run_dir: Path) -> None:
    """Complete the report by the results of base and last version (`compared`) and the history, write and print it.
    Raises `ExampleError` if the history holds what it must not."""
    before, after = compared.entrants
    lineage = LINEAGE.format(model=MODEL, step=report["steps"])
    report |= {
        "evaluation": compared.id,
        "before": win_rate(before),
        "after": win_rate(after),
        "difference": curve.as_json(compared.difference(1, "win")),
        "calls": rows(run_dir, "SELECT count(*) AS calls FROM exchanges")[0]["calls"],
        "lineage": rows(run_dir, lineage),
        "never": count_findings(run_dir),
        # What `examples.common.curve` draws.
        "training": curve.training_points(rows(run_dir, curve.GROUPS.format(value="(r.reward = 1)::DOUBLE"))),
    }
    (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(f"\nlineage of {after.version}:")
    print(ask(run_dir, lineage))
    print(text_report(compared))
    findings = sum(count > 0 for count in report["never"].values())
    print(
        f"{report['steps']} steps, {report['calls']:,} calls, {report['failed_runs']} runs failed, "
        f"{report['wall_s']:.0f} s in all; {findings} of {len(NEVER)} checks of the history have findings\n"
        f"report: {run_dir / 'report.json'}"
    )
    require_none(report["never"])
