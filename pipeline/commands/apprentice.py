"""Start an apprentice: a policy version that is trained on an outside model's best runs, from the log.

    journeywork apprentice --run-dir runs/x
    journeywork apprentice --run-dir runs/x --runs 300 -- --epochs 4 --learning-rate 1e-3
    journeywork apprentice "SELECT trajectory FROM trajectories WHERE task LIKE 'refund%' AND reward >= 0.9"

It runs two commands: `journeywork dataset`, which writes the runs as conversations, and `journeywork train --as sft`,
which trains the first model of the settings on them and publishes the version. Options after `--` are those of
`journeywork train`. Without a query it takes runs that the outside model answered and whose reward, or mean feedback if
there is none, is at least `--least`: the best one of each task, then the second best, and so on up to `--runs`.

docs/apprentice.md is the page about it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config, ConfigError
from pipeline.names import outside_version
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser, exit_on_error

BEST_RUNS = """
WITH answered AS (
  SELECT DISTINCT trajectory FROM exchanges WHERE policy_version = '{version}'
), scored AS (
  SELECT trajectory, arg_max(reward, scored_at) AS reward FROM rewards WHERE branch = 'main' GROUP BY ALL
), told AS (
  SELECT trajectory, avg(value) AS reward FROM signals WHERE kind = 'number' GROUP BY ALL
), graded AS (
  SELECT t.trajectory, coalesce(nullif(t.task, ''), nullif(t.group_id, ''), t.trajectory) AS task,
    coalesce(s.reward, t.reward, f.reward) AS reward
  FROM answered JOIN trajectories t USING (trajectory)
  LEFT JOIN scored s USING (trajectory) LEFT JOIN told f USING (trajectory)
  WHERE t.outcome = 'scored' AND t.split = 'train'
)
SELECT trajectory FROM graded WHERE reward >= {least}
ORDER BY row_number() OVER (PARTITION BY task ORDER BY reward DESC, trajectory), reward DESC, trajectory LIMIT {runs}
"""
"""Query over the views of the store (`store.reading.views`) for the runs that `version` answered, the best one of each
task first. A run's reward is that of its newest verdict, else the agent's own, else the mean of its feedback."""


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before `--`."""
    parser = command_parser("apprentice", __doc__)
    parser.add_argument("query", nargs="?", help="returns runs in a column `trajectory`; default: the best runs")
    parser.add_argument("--master", help="outside model whose runs are taken; default: the only one of the settings")
    parser.add_argument("--runs", type=int, default=1000, help="most runs that are taken; default 1000")
    parser.add_argument("--least", type=float, default=0.5, help="least reward of a run that is taken; default 0.5")
    parser.add_argument("--test-share", default="0.1", help="share of tasks that are not trained; default 0.1")
    parser.add_argument("--out", type=Path, help="folder of the data set; default: `apprentice` in the run directory")
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument("--config", help="settings, in place of the installation's own")
    return parser


def best_runs(config: Config, master: str | None, runs: int, least: float) -> str:
    """Return the SQL query for the best runs of the outside model `master`, or of the only one of the settings: at most
    `runs`, with a reward of at least `least`. Raises `ConfigError` if a model must not learn from them."""
    names = sorted({table.name for table in config.outside})
    if master is None and len(names) != 1:
        raise ConfigError(f"--master: name one of the outside models of the settings: {', '.join(names) or 'none'}")
    name = master or names[0]
    if name not in names:
        raise ConfigError(
            f"--master: no [[outside]] table has the name {name!r}; there are: {', '.join(names) or 'none'}"
        )
    version = outside_version(name)
    if not config.may_train(version):
        raise ConfigError(
            f"[[outside]] {name}: may_train is false, so nothing may learn from its runs. If its provider's terms "
            f"permit it, set may_train = true in each table with this name"
        )
    first, apprentice = config.models[0].name, config.apprentices().get(name, "")
    if apprentice not in ("", first):
        raise ConfigError(
            f"[[outside]] {name}: its apprentice is {apprentice!r}, and only the first model of `models`, {first!r}, "
            f"can be trained on a data set: name {apprentice!r} first"
        )
    return BEST_RUNS.format(version=version.replace("'", "''"), runs=runs, least=least)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits with the status of the part that failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    training_options = arguments[end + 1 :]
    args = _parser().parse_args(arguments[:end])
    with exit_on_error("apprentice", (ConfigError,)):
        config = installation_settings(args.run_dir, args.config)
        query = args.query or best_runs(config, args.master, args.runs, args.least)
    out = str(args.out or config.path("apprentice"))
    installation = ["--run-dir", config.run_dir, *(("--config", args.config) if args.config else ())]
    dataset = [query, "--as", "sft", "--out", out, "--test-share", args.test_share]
    for module, arguments in (
        ("store.datasets.command", dataset),
        ("trainer.commands.train", ["--on", out, "--as", "sft", *training_options]),
    ):
        status = subprocess.run([sys.executable, "-m", module, *arguments, *installation], check=False).returncode
        if status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
