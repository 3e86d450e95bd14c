"""`journeywork influence`: which runs of a step taught it to lose a task.

journeywork influence support@57                        of all tasks that versions before it played as validation
journeywork influence support@57 --task "refund twice"  of this task
"""

from __future__ import annotations

import argparse
import json
import sys

import anyio

from pipeline.printing import visible
from pipeline.running.runs import log_of
from pipeline.telemetry import logs as log
from trainer.commands import cli
from trainer.first import import_first


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="journeywork influence",
        description="Rank the runs that a step learned from by what they did to a task.",
    )
    parser.add_argument("version", help="the step, such as support@57, as `journeywork bisect` finds it")
    parser.add_argument("--task", action="append", default=[], help="name of a task; may be repeated")
    parser.add_argument("--json", action="store_true")
    cli.add_run_arguments(parser)
    args = parser.parse_args(argv)
    log.configure("influence", "ERROR")

    def command() -> None:
        config = cli.run_config(args)
        log_of(config)
        import_first(config)
        from trainer.influence import influences

        ranked = anyio.run(influences, config, args.version, args.task, _tell)
        if args.json:
            sys.stdout.write(json.dumps([run._asdict() for run in ranked]) + "\n")
            return
        for run in ranked:
            line = f"{run.influence:+.4g}  reward {run.reward:g}  {run.trajectory} (group {run.group})"
            sys.stdout.write(visible(line) + "\n")

    cli.run("influence", command)


def _tell(progress: str) -> None:
    sys.stderr.write(visible(progress) + "\n")


if __name__ == "__main__":
    main()
