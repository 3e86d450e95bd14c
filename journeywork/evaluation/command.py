"""`journeywork eval`: play held-out tasks with policy versions and other models, and report with intervals.

    journeywork eval support@0 support@12 https://api.openai.com/v1#gpt-5-mini --key-env OPENAI_API_KEY \\
      --rollout my.agent:play --scenarios held_out.jsonl

An entrant is `<model>` (the version served now), `<model>@<step>` (`@0` or `@base`: the base model), or
`<base URL>#<model>` of an OpenAI-compatible server. The first one is the baseline: the
differences of the others are paired by task. The rollout is called as `rollout(run, task)`, as by `gather`. The results
go to the log (view `evaluations`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio

from journeywork.command_line import add_gateway, at_least_one, client_of, exit_status, gateway_of, output_of_one_object
from journeywork.evaluation.entrants import Entrant, parse_entrant
from journeywork.evaluation.loading import add_tasks, load_rollout, load_scenarios
from journeywork.evaluation.playing import play, versions_of
from journeywork.evaluation.report import text_report
from journeywork.evaluation.results import EvaluationReport
from journeywork.gathering import TooManyExceptionsError
from journeywork.transport import JourneyworkError


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if the evaluation failed or an entrant has no reward, 2 if an argument is unusable."""
    args = _parser().parse_args(argv)
    with (
        exit_status((ValueError, OSError), (JourneyworkError, TooManyExceptionsError)),
        output_of_one_object(args.json),
    ):
        entrants = _entrants(args)
        rollout, tasks = load_rollout(args.rollout), load_scenarios(args.scenarios, args.limit)
        url = gateway_of(args) if args.url or any(e.kind == "policy" for e in entrants) or not args.no_record else ""
        if args.dry_run:
            versions = anyio.run(_versions, args, entrants, url)
        else:
            report = anyio.run(_run, args, entrants, rollout, tasks, url)
    if args.dry_run:
        plan = {"tasks": len(tasks), "versions": dict(zip(args.entrants, versions, strict=True))}
        sys.stdout.write(json.dumps(plan) + "\n")
        return
    if args.json:
        bodies = [report.request_body(position) for position in range(len(report.entrants))]
        sys.stdout.write(json.dumps({"evaluation": report.id, "entrants": bodies}) + "\n")
    else:
        recorded = "recorded on the log" if url and not args.no_record else "not recorded"
        sys.stdout.write(f"{text_report(report)}\n\n{report.id}: {recorded}\n")
    if empty := [result.entrant.name for result in report.entrants if result.unrewarded == len(result.tasks)]:
        sys.stderr.write(
            f"journeywork: no task has a reward for {', '.join(empty)}: the rollout must return the reward, or set "
            "run.reward\n"
        )
        raise SystemExit(1)


async def _run(
    args: argparse.Namespace, entrants: list[Entrant], rollout: Any, tasks: list[Any], url: str
) -> EvaluationReport:
    options: dict[str, Any] = {
        "attempts": args.attempts,
        "concurrency": args.concurrency,
        "max_exceptions": args.max_exceptions,
        "progress": not args.json,
        "scenarios": args.scenarios,
        "rollout_name": args.rollout,
        "record": not args.no_record,
    }
    if not url:
        return await play(None, entrants, tasks, rollout, **options)
    async with client_of(url, args) as client:
        return await play(client, entrants, tasks, rollout, **options)


async def _versions(args: argparse.Namespace, entrants: list[Entrant], url: str) -> list[str]:
    if not url:
        return await versions_of(None, entrants)
    async with client_of(url, args) as client:
        return await versions_of(client, entrants)


def _entrants(args: argparse.Namespace) -> list[Entrant]:
    """Return the entrants with their settings. Raises `ValueError` or `OSError`."""
    if args.key_env and not os.environ.get(args.key_env):
        raise ValueError(f"--key-env {args.key_env}: this environment variable is not set")
    parsed = [parse_entrant(text) for text in args.entrants]
    return [replace(e, key_env=args.key_env) if e.kind == "external" else e for e in parsed]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="journeywork eval",
        description=inspect.cleandoc(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("entrants", nargs="+", metavar="ENTRANT", help="who plays; the first is the baseline")
    add_tasks(parser, "a list, a function that returns one, or JSONL")
    add("--attempts", type=at_least_one, default=1, help="runs of each task (default: 1)")
    add("--limit", type=at_least_one, metavar="N", help="only the first N tasks; default: all")
    add("--key-env", default="", metavar="NAME", help="variable with the API key of <base URL>#<model> entrants")
    add("--no-record", action="store_true", help="send no results to the log")
    add(
        "--dry-run",
        action="store_true",
        help="play nothing; print the number of tasks and each entrant's version, as JSON",
    )
    add_gateway(parser)
    return parser


if __name__ == "__main__":
    main()
