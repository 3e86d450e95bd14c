"""`journeywork group show`: the members of one group with rewards, the judge's words, last replies and people's labels.

journeywork group show support-17
journeywork group show support-17 --branch rejudged
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from store.reading.groups import group as page
from store.reading.history import History
from store.reading.texts import number, when
from store.showing.show import command
from store.showing.show.command import fields, indented


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return command.run("group", argv, _load, describe, _extend)


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--branch", default="main", help="branch of the history; default: main")


def _load(history: History, args: argparse.Namespace) -> dict[str, Any]:
    return page(history, args.id, {"branch": args.branch})


def describe(data: dict[str, Any], args: argparse.Namespace) -> str:
    """The group as text."""
    lines = [f"group {data['group']}  branch {data['branch']}"]
    lines += [
        fields(
            ("status", row["status"]), ("reason", row["reason"]), ("model", row["model"]), ("split", row["split"]),
            ("mean reward", row["reward_mean"]), ("lowest", row["reward_min"]), ("highest", row["reward_max"]),
            ("decided", when(row["decided_at"])),
        )
        for row in data["scored"]
    ]  # fmt: skip
    if not data["scored"]:
        lines.append("not scored yet")
    if task := next((row["task"] for row in data["scored"] if row["task"]), ""):
        lines.append(fields(("task", task)))
    if data["trained_in"]:
        lines.append(fields(("trained in", [row["version"] for row in data["trained_in"]])))
    for place, member in enumerate(data["members"], 1):
        lines += ["", *_member(place, member)]
    return "\n".join(lines)


def _member(place: int, member: dict[str, Any]) -> list[str]:
    run = member["run"] or {}
    lines = [
        f"{place}. {member['trajectory']}",
        "   " + fields(
            ("reward", number(member["reward"])), ("outcome", member["outcome"]), ("calls", run.get("exchanges")),
            ("seconds", run.get("duration_s")), ("components", member["components"]),
        ),
    ]  # fmt: skip
    lines += [indented(f"judge {command.verdict(row)}", "   ") for row in member["verdicts"]]
    for label in member["labels"]:
        comment = f": {label['comment']}" if label["comment"] else ""
        lines.append(indented(f"person {label['by']} {number(label['score'])}{comment}", "   "))
    if reply := member["reply"]:
        lines.append("   last reply:")
        lines += [indented(text, "     ") for text in (reply["content"], reply["tool_calls"]) if text]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
