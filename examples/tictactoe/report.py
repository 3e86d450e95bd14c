"""The demo's report: win rates with intervals, and the SQL queries over the run's history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from examples.tictactoe.agent import Finished
from journeyman.statistics import paired_difference, wilson

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


def win_rate(games: Iterable[Finished]) -> dict[str, Any]:
    """Rate and interval over games that had a result, and how many games ended how."""
    results = [game.result for game in games if game.result is not None]
    rate = wilson(results.count("win"), len(results))
    return {
        "value": rate.mean if results else 0.0,
        "ci95": [rate.low, rate.high],
        "games": rate.count,
        "outcomes": {kind: results.count(kind) for kind in ("win", "draw", "loss", "illegal")},
    }


def difference(before: Sequence[Finished], after: Sequence[Finished]) -> dict[str, Any]:
    """Difference of the win rates of `after` and `before`, with its 95 % interval. The two lists hold the same games in
    the same order, so the interval is that of the mean difference per game; games without a result in either are left
    out. With fewer than two games the interval is -1 to 1."""
    pairs = [
        (a.result == "win", b.result == "win")
        for a, b in zip(before, after, strict=True)
        if a.result is not None and b.result is not None
    ]
    found = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    known = found.count > 1
    return {
        "value": found.mean if known else 0.0,
        "ci95": [max(found.low, -1.0), min(found.high, 1.0)] if known else [-1.0, 1.0],
        "games": found.count,
        "gained": pairs.count((False, True)),
        "lost": pairs.count((True, False)),
    }
