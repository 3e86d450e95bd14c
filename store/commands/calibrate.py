"""`journeywork calibrate`: fits a judge's scores to people's labels.

    journeywork calibrate --out calibration.json                          # the run's judge
    journeywork calibrate --out style.json --reward style                 # one part of a composed reward
    journeywork calibrate --anchors anchors.jsonl                         # only: labelled groups as anchors

The labels are those that people gave runs on the dashboard or by the API under the name `label`. The function is
written to a file for `judge.calibration` and recorded as `group.calibrated`, if it predicts the labels of groups that
it was not fitted to better than the scores themselves do (docs/judging.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import duckdb
import msgspec

from pipeline.calibration import errors, fit
from pipeline.command_line import command_parser
from pipeline.config import Config, ConfigError, JudgeConfig
from pipeline.events import JudgeCalibrated
from pipeline.files import write_whole
from pipeline.log.broker import Broker
from pipeline.running.runs import log_of, run_settings
from pipeline.telemetry import logs
from store.datasets.runs import select
from store.reading import sql
from store.reading.commands import add_run, exit_status

_RUNS, _GROUPS = 20, 5
"""Least numbers of labelled runs and of their groups."""
_LABELS = """
    given AS (
      SELECT project, group_id, trajectory, avg(score) AS label FROM (
        FROM labels WHERE project = $project
        QUALIFY row_number() OVER (PARTITION BY trajectory, given_by ORDER BY given_at DESC) = 1
      ) GROUP BY ALL
    )
"""
"""Each run's label: the mean of people's newest ones."""
_PAIRS = f"""
    WITH {_LABELS}, judged AS (
      SELECT project, trajectory, rubric_hash, avg(score) AS score, max(scored_at) AS newest FROM verdicts
      WHERE rubric = $rubric AND rubric_hash <> '' AND "call" < 0 AND NOT second AND branch = 'main' GROUP BY ALL
    )
    SELECT g.group_id, j.score, g.label, j.rubric_hash FROM given g JOIN judged j USING (project, trajectory)
    WHERE j.rubric_hash = (SELECT arg_max(rubric_hash, newest) FROM judged) ORDER BY g.group_id, g.trajectory
"""  # noqa: S608 - constants
_ANCHORS = f"""
    WITH {_LABELS} SELECT trajectory, label AS reward FROM given
    WHERE group_id IN (SELECT group_id FROM given GROUP BY ALL HAVING count(DISTINCT label) > 1)
"""  # noqa: S608


def ruler_of(config: JudgeConfig, name: str = "") -> tuple[str, str]:
    """Return a judge's part in `components`, and the name of its rubric. Raises `ConfigError`."""
    rulers = (
        {r.name: r.rubric for r in config.rewards if r.kind == "ruler"} if config.rewards else {"ruler": ""}
    )
    if not name and len(rulers) == 1:
        name = next(iter(rulers))
    if name not in rulers:
        raise ConfigError(
            f"--reward: name one of the rewards of kind ruler: {', '.join(rulers) or 'there is none'}"
        )
    return name, Path(rulers[name] or config.rubric or "general").stem


def calibrate(connection: duckdb.DuckDBPyConnection, config: Config, reward: str = "") -> JudgeCalibrated:
    """Fit the labels of the history. Raises `ConfigError` if there are too few, or the fit predicts them no better than
    the scores do."""
    name, rubric = ruler_of(config.judge, reward)
    rows = connection.execute(_PAIRS, {"project": config.project, "rubric": rubric}).fetchall()
    groups: dict[str, list[tuple[float, float]]] = {}
    for group, score, label, _ in rows:
        groups.setdefault(group, []).append((score, label))
    if len(rows) < _RUNS or len(groups) < _GROUPS:
        raise ConfigError(
            f"{len(rows)} runs of {len(groups)} groups have a label and a score by rubric {rubric}; {_RUNS} runs of "
            f"{_GROUPS} groups are needed: label more of them on the dashboard (page of a group)"
        )
    before, after = errors(list(groups.values()))
    if after >= before:
        raise ConfigError(
            f"the fit predicts labels of other groups no better (squared error {after:.4g}) than the scores themselves "
            f"do ({before:.4g}): the judge needs no calibration, or more labels are needed"
        )
    fitted = fit([pair for pairs in groups.values() for pair in pairs])
    return JudgeCalibrated(
        project=config.project, reward=name, calibration=fitted.id, scores=fitted.scores, labels=fitted.labels,
        rubric=rubric, rubric_hash=rows[0][3], runs=len(rows), groups=len(groups), error_before=before,
        error_after=after,
    )  # fmt: skip


def add_anchors(connection: duckdb.DuckDBPyConnection, config: Config, file: Path) -> int:
    """Add the groups whose runs have different labels to a file of anchors, except those that it names. Return how many
    there were to add. Raises `ConfigError` for a file that is none, and if there is no such group."""
    try:
        text = file.read_text("utf-8") if file.exists() else ""
        lines = [line for line in text.split("\n") if line.strip()]  # no `splitlines`: JSON may hold U+2028
        known = {json.loads(line).get("id") for line in lines}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: not a file of anchors: {error}") from error
    # The query is a constant, and `select` takes no parameters: the project is put in as a literal.
    query = _ANCHORS.replace("$project", sql.quoted(config.project))
    groups: dict[str, dict[str, Any]] = {}
    labelled = select(connection, query)
    if not labelled:
        raise ConfigError(
            "no group of the history has runs with different labels: label runs on the dashboard (page of a group), or "
            "by feedback named `label` (docs/gateway.md)"
        )
    for run in labelled:
        if run.group in known or not run.conversations:
            continue
        group = groups.setdefault(run.group, {"id": run.group, "task": run.task, "trajectories": []})
        first, tools = run.conversations[0], run.conversations[0].tools
        group.setdefault("tools", list(tools))
        conversations = [list(c.messages) for c in (first, *run.conversations[1:])]
        group["trajectories"].append(
            {"id": run.trajectory, "conversations": conversations, "reward": run.reward}
        )
    added = [json.dumps(group) for group in groups.values() if len(group["trajectories"]) > 1]
    write_whole(file, "".join(f"{line}\n" for line in [*lines, *added]).encode())
    return len(added)


async def _publish(config: Config, event: JudgeCalibrated) -> None:
    async with Broker.connect(log_of(config), name="calibrate", provision=False) as broker:
        await broker.publish(event)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("calibrate", "Fit a judge's scores to people's labels.")
    parser.add_argument("--out", type=Path, help="file for `judge.calibration`")
    parser.add_argument("--reward", default="", help="the reward of kind ruler; default: the only one")
    parser.add_argument(
        "--anchors", type=Path, help="file for `judge.anchors.file`: labelled groups are added to it"
    )
    add_run(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or an error's status (`exit_status`): 2 if the labels do not allow a calibration."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.out is None and args.anchors is None:
        parser.error("name --out, --anchors or both")
    logs.configure("calibrate", "ERROR")  # an error is printed as one line
    return exit_status("calibrate", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    config = run_settings(args.run_dir, args.config)
    with sql.connect(config) as connection:
        if args.anchors is not None:
            added = add_anchors(connection, config, args.anchors)
            sys.stdout.write(f"{added} groups added to {args.anchors}\n")
        if args.out is None:
            return 0
        event = calibrate(connection, config, args.reward)
    anyio.run(_publish, config, event)
    write_whole(args.out, msgspec.json.encode({"scores": event.scores, "labels": event.labels}))
    sys.stdout.write(
        f"calibration {event.calibration} of {event.reward} from {event.runs} labelled runs: squared error of labels "
        f"{event.error_before:.4g}, with it {event.error_after:.4g} (of groups that were not fitted)\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
