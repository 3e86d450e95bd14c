"""The demo's report: win rates with intervals, and the SQL queries over the run's history."""

from __future__ import annotations

from typing import Any

from journeyman.evaluation import EntrantResult, EvaluationReport
from journeyman.statistics import Estimate

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
  (SELECT max(metrics['sampler_logprob_diff']) FROM checkpoints) AS sampler_logprob_diff,
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
    return {
        **_clamped(report.difference(1, "win"), -1.0),
        "games": round(sum(games[task] for task, _, _ in paired)),
    }


def _clamped(estimate: Estimate, least: float) -> dict[str, Any]:
    """A rate from `least` to 1. Without an interval it is anywhere."""
    known = estimate.count > 1
    return {
        "value": estimate.mean if estimate.count else 0.0,
        "ci95": [max(estimate.low, least), min(estimate.high, 1.0)] if known else [least, 1.0],
    }
