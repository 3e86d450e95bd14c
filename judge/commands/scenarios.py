"""`journeywork scenarios`: training tasks from a description, for agents without a dataset.

    journeywork scenarios --describe task.md --count 50 --out scenarios.jsonl [--set judge.model=…]

The judge model writes them in batches and is shown the tasks that exist already, so that new ones differ. The output
has one JSON object a line: `{"id": "s-…", "task": "…", "difficulty": 1..5}`. The id is a hash of the task, so a
scenario keeps its id, and `--append` continues an interrupted run. Duplicates and near-duplicates are dropped, and a
reply that cannot be parsed is asked for again. An agent uses `task` as its input and `id` as the prefix of its group.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from judge.commands.options import add_settings
from judge.models.chat import ChatModel, Messages, ModelError, list_schema
from judge.models.judge_model import open_judge_model
from judge.ruler.lenient_json import Object, scan_documents
from judge.ruler.prompt import sanitize
from pipeline.config import Config, ConfigError, load
from pipeline.files import write_whole

BATCH = 10
_MAX_SHOWN = 40
"""Existing tasks that the model is shown."""
_MAX_FRUITLESS = 5
"""Batches in a row without a new scenario after which the model is considered out of ideas."""
_MAX_OVERLAP = 0.8
_DEFAULT_DIFFICULTY = 3

_SYSTEM = """You write training tasks for an AI agent. What the agent is for:

{description}

Write tasks that differ in what they ask, in detail and in difficulty, each complete in itself and solvable by this
agent, some hard. Do not solve them. Answer with one JSON object and nothing else:
{{"scenarios": [{{"task": "<what the agent is asked>", "difficulty": <1 (easy) to 5 (hard)>}}]}}"""

_SCHEMA = list_schema("scenarios", {"task": {"type": "string"}, "difficulty": {"type": "integer"}})


class ScenarioError(Exception):
    """The model wrote too few usable scenarios. The second argument is the list of those there are."""


class Scenario(msgspec.Struct, frozen=True):
    """One task to train on."""

    id: str
    task: str
    difficulty: int = _DEFAULT_DIFFICULTY


def make_scenario(task: str, difficulty: int = _DEFAULT_DIFFICULTY) -> Scenario:
    """Return a scenario with the id that follows from its task, and a difficulty of 1 to 5."""
    return Scenario("s-" + hashlib.sha256(task.encode()).hexdigest()[:16], task, min(max(difficulty, 1), 5))


def parse_batch(reply: str) -> list[Scenario]:
    """Return the scenarios in a reply, whatever text surrounds them; none if there are none."""
    found = []
    for value in (d.value for d in scan_documents(reply)):
        entries = value.first(("scenarios", "tasks")) if isinstance(value, Object) else value
        for entry in entries if isinstance(entries, list) else ():
            fields = entry if isinstance(entry, Object) else Object([("task", entry)])
            task, difficulty = fields.first(("task", "scenario", "prompt")), fields.first(("difficulty",))
            if isinstance(task, str) and task.strip():
                given = isinstance(difficulty, float) and abs(difficulty) < 100
                found.append(
                    make_scenario(sanitize(task.strip()), int(difficulty) if given else _DEFAULT_DIFFICULTY)
                )
    return found


def _words(task: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.lower()))


def is_new(candidate: Scenario, kept: Sequence[Scenario]) -> bool:
    """Return whether less than four fifths of its words are those of any scenario in `kept` (Jaccard index)."""
    words = _words(candidate.task)
    others = [_words(s.task) for s in kept]
    return all(len(words & other) < _MAX_OVERLAP * max(len(words | other), 1) for other in others)


async def generate(
    model: ChatModel, description: str, count: int, kept: Sequence[Scenario] = ()
) -> list[Scenario]:
    """Return `count` scenarios, those in `kept` included. Raises `ScenarioError` if the model writes no new ones any
    more."""
    out = list(kept)
    fruitless, why = 0, "nothing new"
    while len(out) < count:
        shown = "\n".join(f"- {s.task[:200]}" for s in out[-_MAX_SHOWN:])
        request = f"Write {min(BATCH, count - len(out))} tasks."
        if shown:
            request += f" They must differ from these:\n{shown}"
        messages: Messages = [
            {"role": "system", "content": _SYSTEM.format(description=description)},
            {"role": "user", "content": request},
        ]
        before = len(out)
        try:
            candidates = parse_batch((await model(messages, _SCHEMA)).text)
        except ModelError as error:
            candidates, why = [], str(error)
        for candidate in candidates:
            if len(out) < count and is_new(candidate, out):
                out.append(candidate)
        fruitless = 0 if len(out) > before else fruitless + 1
        if fruitless >= _MAX_FRUITLESS:
            raise ScenarioError(
                f"{len(out)} of {count} scenarios, then {fruitless} batches without a new one: {why}", out
            )
    return out


def read_scenarios(path: Path) -> list[Scenario]:
    """Read a file of scenarios; an empty list if there is none. Raises `ConfigError` naming the line."""
    out = []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            out.append(msgspec.json.decode(line, type=Scenario))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return out


async def _run(config: Config, description: str, count: int, out: Path) -> str:
    """Add scenarios to the file `out` until it has `count`. Return what went wrong, or an empty string."""
    failure, kept = "", read_scenarios(out)
    try:
        async with open_judge_model(config.judge) as model:
            found = await generate(model, description, count, kept)
    except ScenarioError as error:
        failure, found = error.args
    write_whole(out, b"".join(msgspec.json.encode(s) + b"\n" for s in found))
    return failure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if there are fewer scenarios than were asked for, 2 if settings or files cannot be
    used."""
    parser = argparse.ArgumentParser(
        prog="journeywork scenarios", description="Write training tasks from a description of the agent."
    )
    parser.add_argument("--describe", type=Path, required=True, help="file that says what the agent is for")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSONL")
    parser.add_argument("--append", action="store_true", help="keep what the file holds already")
    add_settings(parser)
    args = parser.parse_args(argv)
    try:
        config = load(args.config or None, args.overrides)
        if not config.judge.model:
            raise ConfigError("judge.model is not set: there is no model to write scenarios")
        if args.out.exists() and not args.append:
            raise ConfigError(f"{args.out} exists: --append keeps what it holds, or name another file")
        try:
            description = args.describe.read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{args.describe}: {error.strerror}") from error
        failure = anyio.run(_run, config, description, args.count, args.out)
    except ConfigError as error:
        sys.stderr.write(f"journeywork: {error}\n")
        raise SystemExit(2) from error
    answer = {"out": str(args.out), "scenarios": len(read_scenarios(args.out))}
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    if failure:
        sys.stderr.write(f"journeywork: {failure}\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
