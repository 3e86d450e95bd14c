"""`journeywork eval`: play held-out tasks with policy versions and outside models, and report with intervals.

    journeywork eval support@0 support@12 gpt-5 --rollout my.agent:play --scenarios held_out.jsonl

An entrant is `<model>` (the version served now, or an outside model), or `<model>@<step>` (`@0` or `@base`: the base
model). The first one is the baseline: the differences of the others are paired by task. The rollout is called as
`rollout(run, task)`, as by `gather`. The results go to the log (view `evaluations`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from journeywork import command_line
from journeywork.evaluation.entrants import Entrant, parse_entrant
from journeywork.evaluation.loading import add_task_options, load_rollout, load_scenarios
from journeywork.evaluation.playing import play, versions_of
from journeywork.evaluation.report import text_report
from journeywork.evaluation.results import EvaluationReport
from journeywork.gathering import TooManyExceptionsError
from journeywork.transport import JourneyworkError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if the evaluation failed or an entrant has no reward, 2 if an argument is unusable."""
    args = _parser().parse_args(argv)
    with (
        command_line.exit_status((ValueError, OSError), (JourneyworkError, TooManyExceptionsError)),
        command_line.output_of_one_object(args.json),
    ):
        entrants = [parse_entrant(text) for text in args.entrants]
        rollout, tasks = load_rollout(args.rollout), load_scenarios(args.scenarios, args.limit)
        report = anyio.run(_run, args, entrants, rollout, tasks)
    if isinstance(report, list):
        plan = {"tasks": len(tasks), "versions": dict(zip(args.entrants, report, strict=True))}
        sys.stdout.write(json.dumps(plan) + "\n")
        return
    if args.json:
        bodies = [report.request_body(position) for position in range(len(report.entrants))]
        sys.stdout.write(json.dumps({"evaluation": report.id, "entrants": bodies}) + "\n")
    else:
        sys.stdout.write(f"{text_report(report)}\n\n{report.id}: recorded on the log\n")
    if empty := [result.entrant.name for result in report.entrants if result.unrewarded == len(result.tasks)]:
        sys.stderr.write(
            f"journeywork: no task has a reward for {', '.join(empty)}: the rollout must return the reward, or set "
            "run.reward\n"
        )
        raise SystemExit(1)


async def _run(
    args: argparse.Namespace, entrants: list[Entrant], rollout: Any, tasks: list[Any]
) -> EvaluationReport | list[str]:
    """Return the report, or with `--dry-run` the versions that the entrants would play with."""
    async with command_line.client_of(args) as client:
        if args.dry_run:
            return await versions_of(client, entrants)
        return await play(
            client,
            entrants,
            tasks,
            rollout,
            attempts=args.attempts,
            concurrency=args.concurrency,
            max_exceptions=args.max_exceptions,
            progress=not args.json,
            scenarios=args.scenarios,
            rollout_name=args.rollout,
        )


def _parser() -> argparse.ArgumentParser:
    parser = command_line.command_parser("eval", __doc__)
    add = parser.add_argument
    add("entrants", nargs="+", metavar="ENTRANT", help="who plays; the first is the baseline")
    add_task_options(parser, scenarios_help="a list, a function that returns one, or JSONL")
    add("--attempts", type=command_line.at_least_one, default=1, help="runs of each task (default: 1)")
    add("--limit", type=command_line.at_least_one, metavar="N", help="only the first N tasks; default: all")
    add("--dry-run", action="store_true", help="play nothing; print the tasks' number and entrants' versions, as JSON")
    command_line.add_play_options(parser)
    return parser


if __name__ == "__main__":
    main()
