"""Delete a person's runs from log, lake and data sets: `journeywork erase`.

    journeywork erase --subject user-17            lists what it would delete
    journeywork erase --subject user-17 --yes      deletes it, and leaves a receipt on the log
    journeywork erase --subject user-17 --yes --finished    leaves out the runs that are not finished, for another time
    journeywork erase --subject user-17 --check    finds the receipt, and nothing else

Each run that names the person is deleted, whole. Versions that learned from it are listed with their descendants, and
the newest version that is neither: `journeywork train --adopt` goes on from there. docs/store.md says what is not
reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from pipeline import crash
from pipeline.config import Config, ConfigError
from pipeline.events import DataErased
from pipeline.files import write_whole
from pipeline.log.broker import Broker
from pipeline.names import version_address
from pipeline.running.installations import installation_settings, log_of
from pipeline.telemetry import logs
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible
from store.datasets import folder as folders
from store.erasure import on_log
from store.erasure.in_lake import Rewriter
from store.erasure.plan import Plan, journal_of, make_plan
from store.lake.lake import open_lake
from store.reading import sql
from store.reading.options import run_command

_WRITTEN_S = 60.0
"""How long the store may take to write what the log holds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 if `--check` finds no receipt or something that is left, or an error's status
    (`run_command`): 2 if runs can't be erased yet."""
    parser = command_parser("erase", __doc__)
    parser.add_argument("--subject", required=True, help="the person, as runs or their calls name it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    what.add_argument("--check", action="store_true", help="look for the receipt and for anything that is left")
    parser.add_argument(
        "--untrained", action="store_true", help="discard groups that wait for the trainer, which must not run"
    )
    parser.add_argument(
        "--finished",
        action="store_true",
        help="leave out runs that are open or wait for a judge or the trainer, which otherwise hold it up",
    )
    parser.add_argument("--by", default="", help="who asked for it, for the receipt")
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    logs.configure("erase", "ERROR")  # an error is printed as one line
    return run_command(parser, lambda args: anyio.run(_run, args), argv)


async def _run(args: argparse.Namespace) -> int:
    if not args.subject:
        raise ConfigError("--subject names nobody")
    config = installation_settings(args.run_dir)
    async with Broker.connect(log_of(config), name="erase", provision=False) as broker:
        await _wait_until_written(broker)
        plan = await anyio.to_thread.run_sync(_make_plan, config, args)
        rewriter = Rewriter(open_lake(config), config.project, plan)
        if not journal_of(config, plan.digest).exists():
            await on_log.count(broker, config.project, plan)
            plan.rows = await anyio.to_thread.run_sync(rewriter.count)
        sys.stdout.write(visible(_summary(plan)))
        if args.check:
            return await _check(config, broker, plan)
        if args.yes and plan.held_up:
            raise ConfigError("nothing was deleted: " + "; ".join(plan.held_up))
        if args.yes and plan.runs:
            await _erase(config, broker, plan, rewriter, args.by)
        elif plan.runs:
            sys.stdout.write(visible(f"nothing was deleted: {_next_step(plan)}\n"))
    return 0


async def _wait_until_written(broker: Broker) -> None:
    """Wait until the store has written what the log holds. Raises `ConfigError` if it doesn't."""
    deadline = anyio.current_time() + _WRITTEN_S
    while await broker.lag("store-"):
        if anyio.current_time() > deadline:
            raise ConfigError("the store has not written what the log holds: start it, and try again")
        await anyio.sleep(0.5)  # the server does not tell when a consumer's lag changes


def _make_plan(config: Config, args: argparse.Namespace) -> Plan:
    """Return the plan of the command's arguments, by the history in the lake."""
    with sql.connect(config) as connection:
        return make_plan(connection, config, args.subject, untrained=args.untrained, finished=args.finished)


async def _erase(config: Config, broker: Broker, plan: Plan, rewriter: Rewriter, by: str) -> None:
    """Delete what the plan reaches and publish the receipt. If it is interrupted, the same command completes it."""
    journal = journal_of(config, plan.digest)
    write_whole(journal, msgspec.json.encode(plan), durable=True, mode=0o600)
    crash.point("erase.planned")
    await on_log.erase(broker, config.project, plan)
    await _wait_until_written(broker)  # the store must hold the discards before its rows are rewritten
    crash.point("erase.log_done")
    for folder in plan.folders:
        folders.remove(Path(folder))
    await anyio.to_thread.run_sync(rewriter.erase)
    crash.point("erase.lake_done")
    await broker.publish(
        DataErased(
            project=config.project,
            erasure=plan.erasure,
            digest=plan.digest,
            runs=len(plan.runs),
            left=len(plan.left),
            messages=plan.messages,
            objects=plan.objects,
            rows=plan.rows,
            folders=len(plan.folders),
            learned=tuple(plan.learned),
            clean=plan.clean,
            by=by,
        )
    )
    crash.point("erase.receipt")
    journal.unlink()
    sys.stdout.write(f"erased; the receipt is {plan.erasure}\n")
    for clean in plan.clean.values():
        if clean.endswith("@0"):
            continue  # the base model: a new project begins with it
        sys.stdout.write(
            visible(
                "to go on from a version without them: journeywork train --adopt "
                f"'{config.run_dir}#{version_address('main', clean)}'\n"
            )
        )


async def _check(config: Config, broker: Broker, plan: Plan) -> int:
    """Print the receipts for the person, and what to do about runs that are left. Return the command's status: 0 if
    there is a receipt and nothing is left, else 1."""
    receipts = [r.event for r in await broker.read(DataErased, project=config.project) if r.event.digest == plan.digest]
    for receipt in receipts:
        messages, rows = sum(receipt.messages.values()), sum(receipt.rows.values())
        numbers = f"{receipt.runs} runs ({receipt.left} left out), {messages} messages, {rows} rows"
        sys.stdout.write(visible(f"receipt {receipt.erasure}: {numbers}; by {receipt.by or 'nobody named'}\n"))
    left = bool(plan.runs or plan.left or journal_of(config, plan.digest).exists())
    if not receipts:
        sys.stdout.write("there is no receipt\n")
    if left:
        sys.stdout.write(visible(f"something is left: {_next_step(plan)}\n"))
    return 1 if left or not receipts else 0


def _next_step(plan: Plan) -> str:
    """Return what to do so that the plan is carried out."""
    if plan.held_up or plan.runs:
        return "; ".join(plan.held_up) or "run the command with --yes"
    return "run the command again when the runs that are left out are finished"


def _summary(plan: Plan) -> str:
    """Return what the plan reaches, as lines of text."""
    lines = [f"{len(plan.runs)} runs in {len(plan.groups)} scored groups"]
    if plan.left:
        shown = ", ".join(plan.left[:10]) + (", …" if len(plan.left) > 10 else "")
        lines.append(f"  left out, as they are open or wait: {len(plan.left)} runs ({shown})")
    lines += [f"  log {stream}: {count} messages" for stream, count in sorted(plan.messages.items())]
    lines += [f"  log: {plan.objects} objects"] if plan.objects else []
    lines += [f"  lake {tag}: {count} rows" for tag, count in sorted(plan.rows.items())]
    lines += [f"  data set {folder}" for folder in plan.folders]
    if plan.learned:
        lines.append(
            f"  versions that learned from them, or descend from one that did, and stay: {', '.join(plan.learned)}"
        )
    lines += [f"  newest version of {model} that descends from none of these: {v}" for model, v in plan.clean.items()]
    lines += [
        f"  this history doesn't know what {v} learned from: it was made from {s}" for v, s in plan.outside.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
