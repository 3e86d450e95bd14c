"""`journeywork trajectory show`: the messages, tools, tokens and verdicts of one run.

journeywork trajectory show t-123
journeywork trajectory show t-123 --tokens
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from store.reading.history import History
from store.reading.trajectories import CALLS
from store.reading.trajectories import trajectory as page
from store.showing.show import command
from store.showing.show.command import fields, indented

_TOKEN_WIDTH = 24


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return command.run("trajectory", argv, _load, describe, _extend)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", action="store_true", help="every sampled token with its logprob")


def _load(history: History, args: argparse.Namespace) -> dict[str, Any]:
    data = page(history, args.id, {"from": "0"})
    for first in range(CALLS, (data["last"] or 0) + 1, CALLS):
        further = page(history, args.id, {"from": str(first)})["calls"]
        if further:
            data["calls"] += further
    for paging in ("from", "last", "count", "step_of"):
        del data[paging]
    if not args.tokens:
        for call in data["calls"]:
            del call["tokens"]
    return data


def describe(data: dict[str, Any], args: argparse.Namespace) -> str:
    """The run as text."""
    run = data["run"]
    lines = [
        f"trajectory {data['trajectory']}",
        fields(
            ("model", run["model"]), ("group", run["group_id"]), ("attempt", run["attempt"]), ("split", run["split"]),
            ("outcome", run["outcome"]), ("reward", run["reward"]), ("calls", run["exchanges"]),
            ("seconds", run["duration_s"]),
        ),
        *([fields(("task", run["task"]))] if run["task"] else []),
        *([fields(("metrics", run["metrics"]))] if run["metrics"] else []),
    ]  # fmt: skip
    for call in data["calls"]:
        lines += ["", *_call(call)]
    if data["rewards"] or data["verdicts"]:
        lines += ["", "verdicts"]
    lines += [
        "  " + fields(("reward", r["reward"]), ("branch", r["branch"]), ("components", r["components"]))
        for r in data["rewards"]
    ]
    lines += [indented(command.verdict(row), "  ") for row in data["verdicts"]]
    if data["trained_in"]:
        lines += ["", fields(("trained in", [row["version"] for row in data["trained_in"]]))]
    return "\n".join(lines)


def _call(call: dict[str, Any]) -> list[str]:
    """The lines of a call."""
    status = call["status"] if call["status"] != "complete" else None
    head = fields(
        ("call", call["seq"]), ("choice", call["choice"] or None), ("by", call["policy_version"]), ("status", status),
        ("prompt tokens", call["prompt_tokens"]), ("sampled tokens", call["sampled_tokens"]),
        ("seconds", call["latency_s"]), ("ended by", call["finish_reason"]),
    )  # fmt: skip
    lines = [head]
    names = [tool.get("function", {}).get("name") or tool.get("name") for tool in call["tools"] if tool]
    if names:
        lines.append("  " + fields(("tools", [name for name in names if name])))
    if earlier := call["earlier"]:
        lines.append(f"  ({earlier} earlier message{'s' if earlier > 1 else ''})")
    for message in [*call["messages"], call["reply"]]:
        lines += _message(message)
    for token in call.get("tokens", ()):
        notes = "  forced" if token["forced"] else "" if token["trained"] else "  not trained"
        logprob = f"{token['logprob']:9.4f}" if token["logprob"] is not None else f"{'–':>9}"
        lines.append(f"  {token['id']:>8} {token['text']!r:<{_TOKEN_WIDTH}} {logprob}{notes}")
    return lines


def _message(message: dict[str, Any]) -> list[str]:
    lines = [f"  {message['role'] or 'reply'}:"]
    if message["content"]:
        lines.append(indented(message["content"]))
    if message["tool_calls"]:
        lines.append(indented(f"calls {message['tool_calls']}"))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
