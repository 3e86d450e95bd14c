"""The demo's report: win rates with intervals, and the results of SQL queries over the run's store."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples.tictactoe.agent import Finished

JOURNEYMAN = str(Path(sys.executable).with_name("journeyman"))
_Z95 = 1.959964

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


def wilson(wins: int, games: int) -> tuple[float, float]:
    """The 95 % score interval of a win rate."""
    if not games:
        return 0.0, 1.0
    p, z2 = wins / games, _Z95**2
    centre = (p + z2 / (2 * games)) / (1 + z2 / games)
    half = _Z95 / (1 + z2 / games) * math.sqrt(p * (1 - p) / games + z2 / (4 * games**2))
    return centre - half, centre + half


def win_rate(games: Iterable[Finished]) -> dict[str, Any]:
    """Rate and interval over games that had a result, and how many games ended how."""
    results = [game.result for game in games if game.result is not None]
    wins = results.count("win")
    outcomes = {kind: results.count(kind) for kind in ("win", "draw", "loss", "illegal")}
    rate = wins / len(results) if results else 0.0
    return {
        "value": rate,
        "ci95": list(wilson(wins, len(results))),
        "games": len(results),
        "outcomes": outcomes,
    }


def difference(before: Sequence[Finished], after: Sequence[Finished]) -> dict[str, Any]:
    """Difference of the win rates of `after` and `before`, with its 95 % interval. The two lists hold the same games in
    the same order, so the interval is that of the mean difference per game; games without a result in either are left
    out."""
    pairs = [
        (a.result == "win", b.result == "win")
        for a, b in zip(before, after, strict=True)
        if a.result is not None and b.result is not None
    ]
    gained, lost, games = pairs.count((False, True)), pairs.count((True, False)), len(pairs)
    if games < 2:
        return {"value": 0.0, "ci95": [-1.0, 1.0], "games": games, "gained": gained, "lost": lost}
    mean = (gained - lost) / games
    variance = (gained + lost - games * mean**2) / (games - 1)
    half = _Z95 * math.sqrt(variance / games)
    return {
        "value": mean,
        "ci95": [max(mean - half, -1.0), min(mean + half, 1.0)],
        "games": games,
        "gained": gained,
        "lost": lost,
    }


def ask(run_dir: Path, query: str, form: str = "json") -> str:
    """Run `journeyman sql` on the run. Raises `CalledProcessError` if it fails."""
    command = [JOURNEYMAN, "sql", "--run-dir", str(run_dir), "--format", form, query]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def rows(run_dir: Path, query: str) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = json.loads(ask(run_dir, query))
    return answer
