"""`journeywork what-if`: what would have been learned from the same runs under other settings.

    journeywork what-if --rubric stricter.md --rubric kinder.md --since 2026-11-20 \\
        --rollout my.agent:play --scenarios held_out.jsonl
    journeywork what-if --with rewards.toml --set trainer.loss.type=dapo --where "task = 'refund'" --from support@40 ...

Each `--rubric` and each `--with` (settings in TOML: rewards, loss, teacher) is a variant; `--set` holds for all of
them, and is the only one if there are no others. A variant is a branch of the log: the selected groups are replayed
onto it, judged again if its settings are about judging, and trained, from a fresh adapter or from `--from`. Then the
last version of each branch and one of `main` play the same held-out tasks, and the dashboard's page What if shows the
differences with their intervals. The same question again goes on where it ended, and evaluates anew. The installation
has to run; `journeywork up --services gateway,sampler,store` is enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import duckdb

from pipeline.config import Config
from pipeline.events import CheckpointPublished, Variant, WhatIfAnswered
from pipeline.log.broker import Broker
from pipeline.names import branch_model, version_address, version_name
from pipeline.running.gateway_api import KEY_VARIABLE, GatewayApi, GatewayError, connect
from pipeline.running.installations import find_installation, installation_settings, log_of
from pipeline.running.state import read_state
from pipeline.terminal.parsers import add_overrides, command_parser
from pipeline.terminal.printing import visible
from store.commands.question import Plan, Question, as_flags, read_question
from store.commands.replay import StoredGroup, replay, select_groups
from store.reading import sql
from store.reading.options import run_command

_KNOWN_WITHIN_S = 30.0
"""How long a gateway may take to read of a version."""
_EVALUATION = ("rollout", "scenarios", "attempts", "limit", "concurrency")
"""Flags that are passed on to `journeywork eval`."""


class WhatIfError(Exception):
    """A part of the answer can't be had. The message says which."""


def answer(args: argparse.Namespace, run_dir: Path) -> WhatIfAnswered:
    """Train and compare the branches, and record the answer. Raises `ConfigError`, `WhatIfError`, and the errors of the
    log and of the store."""
    config, commands = installation_settings(run_dir), Commands(run_dir)
    question = read_question(args, config)
    with sql.connect(config) as connection:
        groups = select_groups(connection, question.selection)
        if not groups:
            raise WhatIfError(f"no scored group of {run_dir} is selected by: {question.selection}")
        if (state := read_state(run_dir)) is None or not state.running:
            raise WhatIfError(
                f"{run_dir} does not run: `journeywork up --run-dir {run_dir} --services gateway,sampler,store` serves "
                "its versions without training"
            )
        # What the last step needs is checked before the first one.
        gateway = connect(argparse.Namespace(run_dir=str(run_dir), url=None, key=None))
        commands.call("eval", question.model, "--dry-run", *_evaluation_flags(args), key=gateway.key)
        anyio.run(_replay_groups, config, connection, groups, question)
        for plan in question.plans:
            _train(commands, question, plan)
        return _compare(args, config, question, len(groups), commands, gateway)


async def _replay_groups(
    config: Config, connection: duckdb.DuckDBPyConnection, groups: Sequence[StoredGroup], question: Question
) -> None:
    """Publish the groups on the branch of each variant. The variants that are judged again share one branch, which has
    the groups as they were: `journeywork rejudge` publishes on their own."""
    for branch in dict.fromkeys(question.runs_branch if p.judged else p.branch for p in question.plans):
        counts = await replay(log_of(config), connection, groups, branch)
        _print(f"{counts['groups']} groups replayed onto {branch}, which had {counts['already']} already")


def _train(commands: Commands, question: Question, plan: Plan) -> None:
    """Train a variant on its branch, whose groups are judged again first if its settings are about judging."""
    settings = as_flags(plan.overrides)
    if plan.judged:
        commands.call("rejudge", "--from-branch", question.runs_branch, "--branch", plan.branch, *settings)
    _print(f"training {plan.branch}")
    own = [f"trainer.branch={plan.branch}"]
    own += [f"models.{question.index}.start={question.start}"] if question.start else []
    commands.call("train", "--until-empty", *settings, *as_flags(own))


def _compare(
    args: argparse.Namespace, config: Config, question: Question, groups: int, commands: Commands, gateway: GatewayApi
) -> WhatIfAnswered:
    """Evaluate the branches' last versions beside `main`'s, and publish the answer."""
    published = anyio.run(_read_checkpoints, config, question.model)
    variants = tuple(_variant(question, plan, published) for plan in question.plans)
    baseline = version_name(question.model, max((c.step for c in published if c.branch == "main"), default=0))
    for variant in variants:
        _wait_until_known(gateway, variant.version)
    flags = _evaluation_flags(args)
    played = json.loads(
        commands.call("eval", baseline, *(v.version for v in variants), "--json", *flags, key=gateway.key)
    )
    answered = WhatIfAnswered(
        project=config.project,
        model=question.model,
        question=question.id,
        selection=question.selection,
        groups=groups,
        start=question.start,
        baseline=baseline,
        variants=variants,
        evaluation=played["evaluation"],
    )
    anyio.run(_publish, config, answered)
    for entrant in played["entrants"]:
        for measure in entrant["measures"]:
            if measure["name"] == "reward":
                _print(_reward_line(entrant["entrant"], measure))
    return answered


def _evaluation_flags(args: argparse.Namespace) -> list[str]:
    """Return those of the arguments that are passed on to `journeywork eval`, as its flags."""
    given = {name: getattr(args, name) for name in _EVALUATION}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


async def _read_checkpoints(config: Config, model: str) -> list[CheckpointPublished]:
    """Return the versions of a model that the log has, of all branches."""
    async with Broker.connect(log_of(config), name="what-if") as broker:
        return [r.event for r in await broker.read(CheckpointPublished, project=config.project, model=model)]


async def _publish(config: Config, event: WhatIfAnswered) -> None:
    """Record the answer on the log."""
    async with Broker.connect(log_of(config), name="what-if") as broker:
        await broker.publish(event)


def _variant(question: Question, plan: Plan, published: Sequence[CheckpointPublished]) -> Variant:
    """Return the variant of `plan` as it was trained: its last version among those `published`, and its groups. Raises
    `WhatIfError` if it has no version."""
    # A checkpoint without groups is no step of training: it is the version that the branch began with.
    trained = [c for c in published if c.branch == plan.branch and c.groups]
    if not trained:
        raise WhatIfError(
            f"{plan.branch} has no version: too few of its groups have rewards that differ for one step of "
            "trainer.groups_per_step groups. Select more, or --set trainer.groups_per_step lower"
        )
    step = max(c.step for c in trained)
    return Variant(
        branch=plan.branch,
        version=version_name(branch_model(question.model, plan.branch), step),
        settings=json.dumps(plan.settings),
        groups=sum(len(c.groups) for c in trained),
    )


def _wait_until_known(gateway: GatewayApi, version: str) -> None:
    """Wait until the gateway knows a version. Raises `GatewayError` if it does not within `_KNOWN_WITHIN_S`."""
    deadline = time.monotonic() + _KNOWN_WITHIN_S
    while True:
        try:
            gateway.ask("GET", f"/v1/models/{quote(version, safe='')}")
            return
        except GatewayError as error:
            if error.status != 404 or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class Commands:
    """Runs commands of Journeywork on an installation. Their output is appended to its `logs/what-if.log`."""

    def __init__(self, run_dir: Path) -> None:
        self._run = ["--run-dir", str(run_dir)]
        self.log = run_dir / "logs" / "what-if.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def call(self, name: str, *flags: str, key: str = "") -> str:
        """Run a command to its end, and return its output. Raises `WhatIfError`, with its last error, else its last
        line, if it fails."""
        command = [sys.executable, "-m", "pipeline", name, *self._run, *flags]
        env = {**os.environ, **({KEY_VARIABLE: key} if key else {})}
        with self.log.open("a") as log:
            began = log.tell()
            # A Ctrl-C reaches the command too: it stops as it should, where `subprocess.run` would kill it.
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=env
            ) as process:
                printed = process.communicate()[0]
        with self.log.open("a") as log:
            log.write(printed)
        if process.returncode:
            text = self.log.read_bytes()[began:].decode("utf-8", "replace")
            lines = [line for line in text.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("journeywork")]
            last = (errors or lines or ["it printed nothing"])[-1]
            what = f"`journeywork {name}` ended with status {process.returncode}"
            raise WhatIfError(f"{what}: {last} ({self.log} has all that it printed)")
        return printed


def _reward_line(name: str, measure: Mapping[str, Any]) -> str:
    """Return an entrant's mean reward as a line, with the difference to the first entrant and its interval if there is
    one."""
    if measure.get("difference") is None:
        return f"{name}: reward {measure['mean']:.4g}"
    ends = (measure["difference_low"], measure["difference_high"])
    low, high = ("?" if end is None else f"{end:+.4g}" for end in ends)
    return f"{name}: reward {measure['mean']:.4g}, difference {measure['difference']:+.4g} [{low}, {high}]"


def _print(text: str) -> None:
    """Write a line to standard output at once, without characters that a terminal would act on."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


# -- the command ---------------------------------------------------------------------------------------------------


def _utc(text: str) -> datetime:
    """Return a time in ISO 8601 as UTC without a zone; one that names no zone is in UTC. Raises `ValueError`."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).replace(tzinfo=None)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("what-if", __doc__)
    add = parser.add_argument
    add("--run-dir", help="default: the running one under runs/, else the newest")
    add("--model", default="", help="default: the first of the settings")
    add("--rubric", action="append", default=[], metavar="FILE", help="judge by this rubric; may be repeated")
    add("--with", action="append", default=[], dest="settings", metavar="FILE", help="settings that differ, TOML")
    add_overrides(parser, "a setting of all variants that do not set it; without --rubric and --with: the only one")
    add("--since", type=_utc, help="only groups scored then or later, ISO 8601")
    add("--where", default="true", help="SQL over the view `groups`")
    add("--from", default="", dest="start", metavar="VERSION", help="begin with it, as models.start; default: none")
    add("--rollout", required=True, metavar="MODULE:FUNCTION", help="plays one held-out task, as by eval")
    add("--scenarios", required=True, metavar="MODULE:NAME|FILE", help="the held-out tasks, as of eval")
    for name in _EVALUATION[2:]:
        add(f"--{name}", type=int, help="as of eval")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or an error's status (`run_command`): 1 if a part of the answer can't be had."""
    return run_command(_parser(), _run, argv, GatewayError, WhatIfError)


def _run(args: argparse.Namespace) -> int:
    run_dir = find_installation(args.run_dir).resolve()
    answered = answer(args, run_dir)
    _print(f"the dashboard's page What if has the answer; evaluation {answered.evaluation}")
    for variant in answered.variants:
        version = version_name(answered.model, int(variant.version.rpartition("@")[2]))
        source = f"{run_dir}#{version_address(variant.branch, version)}"
        _print(f"to go on from {variant.version}: journeywork train --run-dir {run_dir} --adopt '{source}'")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
