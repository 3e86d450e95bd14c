"""`journeywork judge`: measure a judge, or score groups.

journeywork judge eval LABELLED.jsonl     the judge's agreement with known rewards
journeywork judge score GROUP.json        the judge's scores for the trajectories of a group
journeywork judge serve                   the same for many groups, a line each
"""

from __future__ import annotations

from collections.abc import Sequence

from judge.commands import eval as evaluation
from judge.commands import score, serve
from pipeline.config import ConfigError
from pipeline.terminal.parsers import command_parser, exit_on_error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if the judge failed or is not good enough, 2 if settings or a file cannot be used."""
    parser = command_parser("judge", "Measure a judge, or score groups.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    evaluation.add_command(commands)
    score.add_command(commands)
    serve.add_command(commands)
    args = parser.parse_args(argv)
    with exit_on_error("judge", (ConfigError,)):
        args.run(args)


if __name__ == "__main__":
    main()
