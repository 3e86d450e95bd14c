"""`journeyman judge`: measure a judge, or score one group.

journeyman judge eval LABELLED.jsonl     how far the judge agrees with known rewards
journeyman judge score GROUP.json        what the judge gives the trajectories of a group
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import anyio
import msgspec

from judge.commands import eval as evaluation
from judge.commands import score
from pipeline.config import ConfigError, load


def _score(args: argparse.Namespace) -> None:
    answer, status = anyio.run(score.run, load(args.config, args.overrides), args.group)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    if status:
        raise SystemExit(status)


def main(argv: Sequence[str] | None = None) -> None:
    """Exits 1 where the judge failed or is not good enough, 2 on settings or a file that can't be used."""
    parser = argparse.ArgumentParser(
        prog="journeyman judge", description="Measure a judge, or score one group."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    evaluation.add_command(commands)
    scoring = commands.add_parser("score", help="scores of one group, as JSON")
    scoring.add_argument("group", help="the group, JSON; - for standard input")
    scoring.add_argument("--config", help="settings, TOML")
    scoring.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    scoring.set_defaults(run=_score)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except ConfigError as error:
        sys.stderr.write(f"journeyman: {error}\n")
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
