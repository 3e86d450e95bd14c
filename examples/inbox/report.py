"""What the demo prints and writes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from examples.common import curve
from examples.common.history import ask, rows
from examples.common.invariants import NEVER, count_findings, require_none
from examples.common.running import disk_mb
from examples.inbox.agent import Sorter
from examples.inbox.messages import message, right_fields
from journeywork import Estimate, EvaluationReport

SHOWN = 5
"""Number of held-out messages whose answers are printed."""

LINEAGE = """
SELECT version, group_id, count(DISTINCT trajectory) AS runs, sum(sampled_tokens)::BIGINT AS tokens,
  max(staleness) AS staleness, string_agg(DISTINCT policy_version, ' ' ORDER BY policy_version) AS sampled_by
FROM lineage WHERE version = '{version}' GROUP BY ALL ORDER BY group_id LIMIT 4
"""
"""From the last version to the groups that it learned from, and to the versions that sampled them."""
COUNTS = """
SELECT (SELECT count(*) FROM exchanges) AS calls,
  (SELECT count(*) FROM exchanges WHERE status = 'failed') AS failed_calls,
  (SELECT count(*) FROM trajectories WHERE completed_at IS NOT NULL) AS trajectories,
  (SELECT max(step) FROM checkpoints) AS steps,
  (SELECT max(greatest(metrics['on_policy_logprob_diff'], metrics['sampler_logprob_diff'])) FROM checkpoints)
    AS sampler_logprob_diff
"""

SOLVED = "coalesce(t.metrics['solved'], (r.reward > 0.99)::DOUBLE)"
"""Whether a training message was solved. Runs that the gateway found by their calls have no metrics."""

console = Console(highlight=False, markup=False)
BARS = "▁▂▃▄▅▆▇█"


def say(text: str) -> None:
    """Print a line with the time of day."""
    console.print(f"{time.strftime('%H:%M:%S')}  {text}")


def figures(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as the report has it."""
    return {"value": estimate.mean, "ci95": [estimate.low, estimate.high], "n": estimate.count}


def show_progress(sorter: Sorter, step: int, last: int) -> None:
    """Print the step that is served, `last`, and the share of solved training messages by step, as a row of bars."""
    shares = [fmean(solved) for _, solved in sorted(sorter.solved.items())]
    bars = "".join(BARS[min(int(share * len(BARS)), len(BARS) - 1)] for share in shares)
    newest = f"{fmean(shares[-4:]):.2f}" if shares else "-"
    say(f"step {step}/{last}  solved in training {newest}  {bars}")


def show_answers(sorter: Sorter, versions: Sequence[str]) -> None:
    """Print the first held-out messages with the answers of these versions."""
    table = Table(*(Column(name, overflow="fold") for name in ("message", *versions)), show_lines=True)
    for number in range(SHOWN):
        shown = message("held_out", number)
        cells = []
        for version in versions:
            answer = sorter.answers[shown.id].get(version, "")
            solved = right_fields(shown, answer)["solved"]
            cells.append(Text(("✓ " if solved else "✗ ") + answer, style="green" if solved else "red"))
        table.add_row(Text(shown.text), *cells)
    console.print(table)


def conclude(
    compared: EvaluationReport, sorter: Sorter, run_dir: Path, args: argparse.Namespace, wall_s: float
) -> None:
    """Write and print the report. `compared`: warm start, last version and base model, in this order; `wall_s`: seconds
    of the whole demo. Raises `ExampleError` if the history holds what it must not."""
    warm, trained, base = compared.entrants
    (counts,) = rows(run_dir, COUNTS)
    findings = {name: count for name, count in count_findings(run_dir).items() if count}
    points = rows(run_dir, curve.GROUPS.format(value=SOLVED))
    scores = {"base": base, "warm_start": warm, "trained": trained}
    gain = compared.difference(1, "solved")
    written = {
        "seed": args.seed,
        "versions": {name: entrant.version for name, entrant in scores.items()},
        "held_out": {name: figures(entrant.estimate("solved")) for name, entrant in scores.items()},
        "difference": figures(gain),
        "fields": {
            name: {field: entrant.estimate(field).mean for field in ("team", "urgency", "order")}
            for name, entrant in scores.items()
        },
        "wall_s": round(wall_s, 1),
        "train_s": round(sorter.train_s, 1),
        "processes": sorter.usage,
        "disk_mb": disk_mb(run_dir),
        **counts,
        "failed_held_out_runs": sum(entrant.failed for entrant in compared.entrants),
        "findings": findings,
        "answers": {message("held_out", n).text: sorter.answers[message("held_out", n).id] for n in range(SHOWN)},
        # What `examples.common.curve` draws.
        "training": curve.training_points(points),
        "before": curve.as_json(warm.estimate("solved")),
        "after": curve.as_json(trained.estimate("solved")),
    }
    (run_dir / "report.json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    table = Table("version", "held-out messages", "solved", "95 % interval", "team", "urgency", "order")
    for name, entrant in scores.items():
        score, fields = entrant.estimate("solved"), written["fields"][name]
        label = f"{entrant.version} ({name.replace('_', ' ')})"
        table.add_row(
            label,
            f"{score.count}",
            f"{score.mean:.3f}",
            f"{score.low:.3f} to {score.high:.3f}",
            *(f"{fields[field]:.2f}" for field in ("team", "urgency", "order")),
        )
    console.print(table)
    console.print(
        f"difference of the last version and the warm start, over the same {gain.count} messages: {gain.mean:+.3f}, "
        f"95 % interval {gain.low:+.3f} to {gain.high:+.3f}\n"
        f"what {trained.version} learned from, in part:\n{ask(run_dir, LINEAGE.format(version=trained.version))}"
        f"{counts['calls']:,} calls, {counts['failed_calls']} failed, {len(findings)} of {len(NEVER)} checks of the "
        f"history with findings, {wall_s:.0f} s in all\n"
        f"memory {sum(usage['memory_mb'] for usage in sorter.usage.values()) / 1000:.1f} GB ("
        + ", ".join(f"{name} {usage['memory_mb'] / 1000:.1f}" for name, usage in sorter.usage.items())
        + f"), disk {written['disk_mb'] / 1000:.1f} GB\n"
        f"report: {run_dir / 'report.json'}\n"
        f'look around: journeywork ui --run-dir {run_dir}    journeywork sql --run-dir {run_dir} "SHOW TABLES"'
    )
    require_none(findings)
