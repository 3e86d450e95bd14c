"""Decide which version a model name is routed to: `journeywork policy`.

    journeywork policy list                                   the version of each model name, and why
    journeywork policy promote support@12 --reason "better on held-out tasks"
    journeywork policy rollback support                       take back the last decision
    journeywork policy split support@12 support@10 --percent 20
    journeywork policy follow support                         the newest version again
    journeywork policy promote support@12 --prompt better.txt --replaces system.txt    with a prompt

The name may be that of an outside model with an apprentice, `master` say. It stands for itself as `outside:master`:

    journeywork policy split inbox@12 outside:master --percent 5
    journeywork policy promote inbox@12 --of master
    journeywork policy follow master                          all to the apprentice's name, `inbox`

Each decision is an event on the log. A version is loaded on enough servers before the decision takes effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.config import ConfigError
from pipeline.names import InvalidNameError, is_outside, outside_model, parse_version
from pipeline.running.gateway_api import GatewayApi, GatewayError, add_arguments, connect, say_what_is_awaited
from pipeline.terminal.parsers import command_parser, exit_on_error
from pipeline.terminal.printing import visible

_DONE = {
    "promote": "promoted",
    "pin": "pinned",  # of logs from before 0.2
    "rollback": "the decision after it was taken back",
    "split": "split",
    "follow": "follows the newest",
}
"""By action, how `list` names the last decision."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 0 on success, 1 if the gateway refuses or does not answer, 2 for invalid usage."""
    args = _parser().parse_args(argv)
    with exit_on_error("policy", (ConfigError, InvalidNameError, OSError, UnicodeDecodeError), (GatewayError,)):
        gateway = connect(args)
        _list(gateway, None if args.action == "list" else _decide(gateway, args))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("policy", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="action")
    gateway = argparse.ArgumentParser(add_help=False)
    add_arguments(gateway)
    decision = argparse.ArgumentParser(add_help=False, parents=[gateway])
    decision.add_argument("--reason", default="", help="it is kept on the log, and `list` shows it")
    decision.add_argument("--by", default="", help="who decides; with API keys, the key's name is recorded instead")
    of_version = argparse.ArgumentParser(add_help=False, parents=[decision])
    of_version.add_argument(
        "--min-logprob",
        type=float,
        metavar="L",
        help="about an outside model: its apprentice's answers with a lower mean logprob are not shown",
    )
    of_version.add_argument(
        "version", help="exact version, such as support@12; in a split it gets --percent of the runs"
    )
    commands.add_parser("list", parents=[gateway], help="show the version of each model name, and why")
    promote = commands.add_parser("promote", parents=[of_version], help="route a model name to a version from now on")
    promote.add_argument("--of", metavar="MODEL", help="outside model that its apprentice's version answers for")
    promote.add_argument("--prompt", metavar="FILE", help="system prompt that the version gets")
    promote.add_argument("--replaces", metavar="FILE", help="the agent's system prompt in whose place it is put")
    split = commands.add_parser("split", parents=[of_version], help="divide trajectories between two versions")
    split.add_argument("other", help="the version that gets the rest")
    split.add_argument("--percent", type=float, required=True, help="from 0 to 100")
    for name, help_text in (
        ("rollback", "take back the last decision; again: the one before it"),
        ("follow", "route a model name to the newest version again"),
    ):
        commands.add_parser(name, parents=[decision], help=help_text).add_argument("model", help="name of the model")
    return parser


def _decide(gateway: GatewayApi, args: argparse.Namespace) -> str:
    """Make a decision. Returns the name of the model that it is about."""
    body: dict[str, Any] = {"by": args.by, "reason": args.reason}
    if args.action in ("follow", "rollback"):
        model = str(args.model)
    else:
        body |= {"version": args.version, "min_logprob": args.min_logprob}
        if args.action == "split":
            body |= {"other": args.other, "percent": args.percent}
            model = _answered_name(args.other if is_outside(args.other) else args.version)
        else:
            model = args.of or _answered_name(args.version)
            files = {"prompt": args.prompt, "replaces": args.replaces}
            body |= {name: Path(file).read_text("utf-8") for name, file in files.items() if file}
        say_what_is_awaited(*(body[name] for name in ("version", "other") if name in body))
    gateway.ask("POST", f"/v1/policies/{quote(model, safe='')}/{args.action}", body)
    return model


def _list(gateway: GatewayApi, model: str | None) -> None:
    """Print what each model name is routed to, and why; only about `model` if it is given."""
    for policy in gateway.ask("GET", "/v1/policies")["data"]:
        if model in (None, policy["model"]):
            sys.stdout.write(visible(_description(policy)) + "\n")


def _answered_name(version: str) -> str:
    """Return the model name whose calls `version` answers, unless `--of` names another one. Raises
    `InvalidNameError`."""
    return outside_model(version) if is_outside(version) else parse_version(version)[0]


def _description(policy: dict[str, Any]) -> str:
    """Return the lines about one model name that `list` prints. `policy`: an item of `GET /v1/policies`."""
    model, decision, version = policy["model"], policy.get("decision"), policy["version"]
    if decision and decision["other"]:
        version = (
            f"{decision['percent']:g} % {decision['version']}, {100 - decision['percent']:g} % {decision['other']}"
        )
    if decision:
        why = _why(decision)
    elif is_outside(version):
        why = "it is an outside model; there was no decision"
    else:
        why = "it follows the newest version that enough servers hold; there was no decision"
    prompt = f" with the prompt {policy['prompt']}" if policy.get("prompt") else ""
    lines = [
        f"{model}: {version}{prompt}",
        f"  why: {why}",
        f"  newest {policy['newest']}, loaded {', '.join(policy['loaded']) or 'none'}",
        *(f"  refused {refused}: {why}" for refused, why in policy["refused"].items()),
    ]
    return "\n".join(lines)


def _why(decision: dict[str, Any]) -> str:
    """Return what was decided, by whom, when and for which reason. `decision`: of an item of `GET /v1/policies`."""
    at = datetime.fromtimestamp(decision["at"] / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")
    by = f" by {decision['by']}" if decision["by"] else ""
    reason = f": {decision['reason']}" if decision["reason"] else ""
    return f"{_DONE[decision['action']]}{by} at {at} UTC{reason}"


if __name__ == "__main__":
    main()
