"""`journeyman scenarios`: tasks to train on, made from a description, where no dataset exists.

    journeyman scenarios --describe task.md --count 50 --out scenarios.jsonl [--set judge.model=…]

The judge model writes them in batches; each batch is shown what there is already, so that they differ. One JSON object
a line: `{"id": "s-…", "task": "…", "difficulty": 1..5}`. The id is a hash of the task, so a scenario keeps its id, and
with `--append` an interrupted run goes on where it stopped. Duplicates and near-duplicates are dropped, and a reply that
can't be read is asked for again. An agent uses `task` as its input and `id` as the prefix of its group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from judge.models.chat import ChatModel, Messages, ModelError
from judge.models.judge_model import open_judge_model
from judge.ruler.lenient_json import Object, documents
from judge.ruler.prompt import defuse
from pipeline.config import Config, ConfigError, load

BATCH = 10
_SHOWN = 40
_FRUITLESS = 5
"""Batches in a row without a new scenario before the model is taken to be out of ideas."""
_NEAR = 0.8

_SYSTEM = """You write training tasks for an AI agent. What the agent is for:

{description}

Write tasks that differ in what they ask, in detail and in difficulty, each complete in itself and solvable by this
agent, some hard. Do not solve them. Answer with one JSON object and nothing else:
{{"scenarios": [{{"task": "<what the agent is asked>", "difficulty": <1 (easy) to 5 (hard)>}}]}}"""

_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "scenarios",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "scenarios": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"task": {"type": "string"}, "difficulty": {"type": "integer"}},
                        "required": ["task", "difficulty"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["scenarios"],
            "additionalProperties": False,
        },
    },
}


class ScenarioError(Exception):
    """The model gave too few usable scenarios; those that there are have been kept."""


class Scenario(msgspec.Struct, frozen=True):
    """One task to train on."""

    id: str
    task: str
    difficulty: int = 3


def scenario(task: str, difficulty: int = 3) -> Scenario:
    """With the id that its task gives it."""
    return Scenario("s-" + hashlib.sha256(task.encode()).hexdigest()[:16], task, min(max(difficulty, 1), 5))


def read_batch(reply: str) -> list[Scenario]:
    """The scenarios in a reply, whatever stands around them; none where it can't be read."""
    found = []
    for document in (d.value for d in documents(reply)):
        entries = document.first(("scenarios", "tasks")) if isinstance(document, Object) else document
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, str):
                task, difficulty = entry, 3
            elif isinstance(entry, Object):
                task, difficulty = entry.first(("task", "scenario", "prompt")), entry.first(("difficulty",))
            else:
                continue
            if isinstance(task, str) and task.strip():
                level = difficulty if isinstance(difficulty, int) and not isinstance(difficulty, bool) else 3
                found.append(scenario(defuse(task.strip()), level))
    return found


def _words(task: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.lower()))


def is_new(candidate: Scenario, kept: Sequence[Scenario]) -> bool:
    """Whether it shares fewer than four fifths of its words with every other."""
    words = _words(candidate.task)
    return all(len(words & (other := _words(s.task))) < _NEAR * max(len(words | other), 1) for s in kept)


async def generate(
    model: ChatModel, description: str, count: int, kept: Sequence[Scenario] = ()
) -> list[Scenario]:
    """`count` scenarios, those in `kept` included. Raises `ScenarioError` where the model brings nothing new any more,
    with what there is as its second argument."""
    out = list(kept)
    fruitless = 0
    why = "nothing new"
    while len(out) < count:
        shown = "\n".join(f"- {s.task[:200]}" for s in out[-_SHOWN:])
        ask = f"Write {min(BATCH, count - len(out))} tasks."
        if shown:
            ask += f" They must differ from these:\n{shown}"
        messages: Messages = [
            {"role": "system", "content": _SYSTEM.format(description=description)},
            {"role": "user", "content": ask},
        ]
        before = len(out)
        try:
            reply = await model(messages, _SCHEMA)
        except ModelError as error:
            why = str(error)
        else:
            for candidate in read_batch(reply.text):
                if len(out) < count and is_new(candidate, out):
                    out.append(candidate)
        fruitless = 0 if len(out) > before else fruitless + 1
        if fruitless >= _FRUITLESS:
            raise ScenarioError(
                f"{len(out)} of {count} scenarios, then {fruitless} batches in vain: {why}", out
            )
    return out


def read_scenarios(path: Path) -> list[Scenario]:
    """What a file holds already; nothing where there is none. Raises `ConfigError` naming the line."""
    if not path.exists():
        return []
    out = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            out.append(msgspec.json.decode(line, type=Scenario))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return out


def write_scenarios(path: Path, scenarios: Sequence[Scenario]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in scenarios))
    temporary.replace(path)


async def _run(config: Config, description: str, count: int, out: Path, kept: Sequence[Scenario]) -> str:
    """Returns what went wrong, or nothing."""
    failure = ""
    try:
        async with open_judge_model(config.judge) as model:
            found = await generate(model, description, count, kept)
    except ScenarioError as error:
        failure, found = str(error.args[0]), error.args[1]
    write_scenarios(out, found)
    return failure


def main(argv: Sequence[str] | None = None) -> None:
    """The command; exits 1 where fewer scenarios came than were wanted, 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="journeyman scenarios", description="Make scenarios from a task description."
    )
    parser.add_argument("--describe", type=Path, required=True, help="file that says what the agent is for")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="JSONL")
    parser.add_argument("--append", action="store_true", help="keep what the file holds already")
    parser.add_argument("--config", help="settings, TOML")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    args = parser.parse_args(argv)
    try:
        config = load(args.config, args.overrides)
        if not config.judge.model:
            raise ConfigError("judge.model is not set: there is no model to write scenarios")
        try:
            description = args.describe.read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{args.describe}: {error.strerror}") from error
        if args.out.exists() and not args.append:
            raise ConfigError(f"{args.out} exists: --append keeps what it holds, or name another file")
        failure = anyio.run(_run, config, description, args.count, args.out, read_scenarios(args.out))
    except ConfigError as error:
        sys.stderr.write(f"journeyman: {error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(json.dumps({"out": str(args.out), "scenarios": len(read_scenarios(args.out))}) + "\n")
    if failure:
        sys.stderr.write(f"journeyman: {failure}\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
