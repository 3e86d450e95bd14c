"""`journeywork diff`: compares two sets of verdicts over the same groups by the resulting advantages.

    journeywork diff --a branch=main --b branch=colder
    journeywork diff --a judge=3f2c… --b judge=91ab… --format json

A side is selected by `branch=`, `judge=` (a verdict set), `judge_model=` (that model's mean scores instead of the
groups' final rewards; with `rubric=`, the hash of a rubric, if it judged by several), or several of them joined by
commas. The groups and trajectories that both sides have are compared: advantages whose sign flips and the checkpoints
that were trained on them, Spearman's rank correlation within groups, groups without variance on each side. With
`--calls` it is the rewards of single calls that are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import duckdb
import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.config import ConfigError
from pipeline.events.types import REWARD_TOLERANCE
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible_json
from store.reading import sql
from store.reading.options import add_installation, run_command

_KEYS = ("branch", "judge", "judge_model", "rubric")
_COLUMNS = {"rubric": "rubric_hash"}
"""Columns of the views whose names are not those of the keys."""

_OF_CALLS = """trajectory || '/' || "call", value FROM (
    SELECT *, unnest(map_keys(call_rewards)) AS "call", unnest(map_values(call_rewards)) AS value FROM rewards
)"""


def parse_side(text: str) -> dict[str, str]:
    """Parse a side such as `branch=main,judge=…` into a filter: value by key. Raises `ConfigError` for an unknown
    key."""
    side = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in _KEYS:
            raise ConfigError(f"{part!r} selects nothing: write {' or '.join(k + '=…' for k in _KEYS)}")
        side[key] = value
    return side


Group = tuple[str, str, str]
"""Project, model and id of a group: two models may have groups of one id."""
Rewards = dict[Group, dict[str, float]]
"""Rewards by group and trajectory, or by group and call."""

_MODEL_SCORES = """
    SELECT project, model, group_id, trajectory, avg(score), list(DISTINCT (rubric_hash, rubric))
    FROM verdicts WHERE "call" < 0 AND {conditions}
    GROUP BY project, model, group_id, branch, judge, trajectory, scored_at ORDER BY scored_at
"""
"""A model's mean scores: a judge asks it several times (`judge.passes`)."""


def checkpoints_trained_on(
    connection: duckdb.DuckDBPyConnection, flipped: Rewards, branch: str = "main"
) -> list[dict[str, Any]]:
    """Return the checkpoints of a branch that were trained on trajectories of `flipped`, whose rewards don't matter
    here: each with how many of its trajectories are in `flipped`, and how many it has."""
    # The view `staleness` has a row for each trajectory that a version was trained on.
    keys = [(*group, trajectory) for group, rewards_of in flipped.items() for trajectory in rewards_of]
    rows = connection.execute(
        """
        WITH flipped AS (
          SELECT unnest(?) AS project, unnest(?) AS model, unnest(?) AS group_id, unnest(?) AS trajectory
        )
        SELECT s.project, s.version, count(f.trajectory) AS flipped, count(*) AS trajectories
        FROM staleness s LEFT JOIN flipped f USING (project, model, group_id, trajectory) WHERE s.branch = ?
        GROUP BY s.project, s.model, s.version, s.step HAVING flipped > 0 ORDER BY s.project, s.model, s.step
        """,
        [*([key[part] for key in keys] for part in range(4)), branch],
    ).fetchall()
    return [
        {"project": project, "version": version, "flipped": in_flipped, "trajectories": trajectories}
        for project, version, in_flipped, trajectories in rows
    ]


def rewards(connection: duckdb.DuckDBPyConnection, side: dict[str, str], *, calls: bool = False) -> Rewards:
    """Return the rewards of scored members, or a judge model's scores, by group and trajectory; `calls`: the rewards of
    their calls, by group and call. `side`: a filter by `parse_side`. If a group was scored several times, the latest
    counts. Raises `ConfigError` for scores of calls, and of a model that judged a group by several rubrics."""
    if "judge_model" in side and calls:
        raise ConfigError("--calls compares rewards, not one model's scores: leave judge_model out")
    if "rubric" in side and "judge_model" not in side:
        raise ConfigError("rubric= selects scores of one model: add judge_model=…")
    conditions = " AND ".join(f"{_COLUMNS.get(key, key)} = ?" for key in side)
    if "judge_model" in side:
        query = _MODEL_SCORES.format(conditions=conditions)
    else:
        source = _OF_CALLS if calls else "trajectory, reward FROM rewards"
        conditions += " AND outcome = 'scored'"
        query = f"SELECT project, model, group_id, {source} WHERE {conditions} ORDER BY scored_at"
    by_group: Rewards = {}
    for project, model, group, trajectory, value, *rubrics in connection.execute(query, list(side.values())).fetchall():
        if rubrics and len(by_hash := dict(rubrics[0])) > 1:
            listed = " or ".join(f"rubric={digest} ({name})" for digest, name in sorted(by_hash.items()))
            raise ConfigError(
                f"judge_model={side['judge_model']} scored group {group} by several rubrics: add {listed}"
            )
        by_group.setdefault((project, model, group), {})[trajectory] = value
    return by_group


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks from 0. Equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_rank: npt.NDArray[np.float64] = (ends - counts + ends - 1) / 2
    return mean_rank[inverse]


def _signs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the sign of each advantage; 0 within `REWARD_TOLERANCE`."""
    centered = values - values.mean()
    return np.where(np.abs(centered) <= REWARD_TOLERANCE, 0, np.sign(centered)).astype(np.int64)


def compare(a: Rewards, b: Rewards) -> tuple[dict[str, Any], Rewards]:
    """Compare the trajectories and groups that both sides have. Return the figures, of which one is `None` if there is
    nothing to compare, and the trajectories whose advantages have different signs, with the reward on side `b`."""
    groups = trajectories = flat_a = flat_b = 0
    correlations: list[float] = []
    flipped: Rewards = {}
    for group in sorted(a.keys() & b.keys()):
        shared = sorted(a[group].keys() & b[group].keys())
        if len(shared) < 2:
            continue
        x = np.array([a[group][t] for t in shared])
        y = np.array([b[group][t] for t in shared])
        x_is_flat, y_is_flat = (bool(np.ptp(values) <= REWARD_TOLERANCE) for values in (x, y))
        groups += 1
        trajectories += len(shared)
        flat_a += x_is_flat
        flat_b += y_is_flat
        if not x_is_flat and not y_is_flat:
            correlations.append(float(np.corrcoef(_ranks(x), _ranks(y))[0, 1]))
        opposite = _signs(x) * _signs(y) < 0
        if opposite.any():
            flipped[group] = {t: b[group][t] for t, differs in zip(shared, opposite, strict=True) if differs}
    changed = sum(map(len, flipped.values()))
    return {
        "groups": groups,
        "trajectories": trajectories,
        "only_in_a": len(a.keys() - b.keys()),
        "only_in_b": len(b.keys() - a.keys()),
        "sign_flips": changed,
        "sign_flip_share": changed / trajectories if trajectories else None,
        "rank_correlation": float(np.mean(correlations)) if correlations else None,
        "rank_correlation_groups": len(correlations),
        "no_variance_share_a": flat_a / groups if groups else None,
        "no_variance_share_b": flat_b / groups if groups else None,
    }, flipped


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("diff", "Compare two sets of verdicts over the same groups.")
    parser.add_argument("--a", required=True, help="such as branch=main")
    parser.add_argument("--b", required=True, help="such as branch=replayed or judge_model=openai/gpt-5-mini")
    parser.add_argument("--calls", action="store_true", help="compare the rewards of calls instead of those of runs")
    add_installation(parser)
    parser.add_argument("--format", default="table", choices=("table", "json"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 if the sides share no group, or an error's status (`run_command`)."""
    return run_command(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> int:
    config = installation_settings(args.run_dir, args.config, sections=("store",))
    with sql.connect(config) as connection:
        first, second = parse_side(args.a), parse_side(args.b)
        a, b = (rewards(connection, side, calls=args.calls) for side in (first, second))
        result, flipped = compare(a, b)
        checkpoints = [] if args.calls else checkpoints_trained_on(connection, flipped, first.get("branch", "main"))
    if args.format == "json":
        result |= {
            "flipped": [
                {"project": project, "model": model, "group_id": group, "trajectories": sorted(names)}
                for (project, model, group), names in flipped.items()
            ],
            "checkpoints": checkpoints,
        }
        sys.stdout.write(visible_json(msgspec.json.encode(result).decode()) + "\n")
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:<24}{'-' if value is None else f'{value:.6g}'}\n")
        for row in checkpoints:
            sys.stdout.write(
                f"{row['project']}/{row['version']} was trained on {row['flipped']} of them, of {row['trajectories']} "
                "trajectories\n"
            )
    if not result["groups"]:
        sys.stderr.write("journeywork: the two sides share no group of two trajectories (or calls) or more\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
