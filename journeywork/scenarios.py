"""`journeywork scenarios`: training tasks from a description, for agents without a dataset.

    journeywork scenarios --describe task.md --count 50 --out scenarios.jsonl --model gpt-5-mini

A model behind an OpenAI-compatible server writes them in batches and is shown the tasks that exist already, so that new
ones differ. The output has one JSON object a line: `{"id": "s-…", "task": "…", "difficulty": 1..5}`. The id is a hash
of the task. The file is written after each batch, and `--append` continues an interrupted run. An agent uses `task` as
its input and `id` as the prefix of its group. `journeywork.art.mcp.generate_scenarios` describes the tools of a server
and calls `write_scenarios`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx

from journeywork.command_line import at_least_one, exit_status
from journeywork.transport import authorization

DIFFICULTIES = range(1, 6)
_BATCH = 10
_MAX_SHOWN = 40
"""Existing tasks that the model is shown."""
_MAX_FRUITLESS = 3
"""Replies in a row without a new scenario after which the model is considered out of ideas."""
_MAX_OVERLAP = 0.8
_TIMEOUT_S = 600.0

_SYSTEM = """You write training tasks for an AI agent. What the agent is for:

{description}

Write tasks that differ in what they ask, in detail and in difficulty, each complete in itself and solvable by this
agent, some hard. Do not solve them. Answer with one JSON object and nothing else:
{{"scenarios": [{{"task": "<what the agent is asked>", "difficulty": <1 (easy) to 5 (hard)>}}]}}"""


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_ENTRY = _object_schema(task={"type": "string"}, difficulty={"type": "integer", "enum": list(DIFFICULTIES)})
_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "scenarios",
        "strict": True,
        "schema": _object_schema(scenarios={"type": "array", "items": _ENTRY}),
    },
}


class ScenarioError(ValueError):
    """Too few scenarios were written."""


@dataclass(frozen=True)
class Scenario:
    """One task to train on."""

    id: str
    task: str
    difficulty: int


def make_scenario(task: str, difficulty: int) -> Scenario:
    """Return a scenario with the id that follows from its task.

    Raises `ValueError` for a difficulty that is not a whole number from 1 to 5."""
    if type(difficulty) is not int or difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty must be a whole number from 1 to 5, not {difficulty!r}")
    return Scenario("s-" + hashlib.sha256(task.encode()).hexdigest()[:16], task, difficulty)


@dataclass(frozen=True)
class Writer:
    """A model that writes scenarios."""

    model: str
    """As its server calls it."""
    api_base: str
    """URL of an OpenAI-compatible server."""
    key: str


async def write_scenarios(
    writer: Writer,
    description: str,
    count: int,
    existing: Sequence[Scenario] = (),
    keep: Callable[[Sequence[Scenario]], object] = lambda _: None,
) -> list[Scenario]:
    """Return `count` scenarios, `existing` ones included; near-duplicates are left out. `keep` is called with all that
    there are after each reply that has new ones.

    Raises `ScenarioError` if the model writes no new ones any more or its server fails."""
    scenarios = list(existing)
    fruitless = 0
    system = _SYSTEM.format(description=description)
    while len(scenarios) < count:
        request = f"Write {min(_BATCH, count - len(scenarios))} tasks."
        if scenarios:
            shown = "\n".join(f"- {s.task[:200]}" for s in scenarios[-_MAX_SHOWN:])
            request += f" They must differ from these:\n{shown}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        try:
            reply = await _ask(writer, messages)
        except httpx.HTTPError as error:
            raise ScenarioError(f"{writer.api_base}: {error}") from error
        before = len(scenarios)
        for candidate in parse_scenarios(reply):
            if len(scenarios) < count and is_new(candidate, scenarios):
                scenarios.append(candidate)
        if len(scenarios) > before:
            fruitless = 0
            keep(scenarios)
        elif (fruitless := fruitless + 1) >= _MAX_FRUITLESS:
            raise ScenarioError(
                f"{writer.model} wrote {len(scenarios)} of {count} scenarios, then nothing new in {fruitless} replies"
            )
    return scenarios


async def _ask(writer: Writer, messages: list[dict[str, str]]) -> str:
    """Return the text of the model's reply. Raises `httpx.HTTPError`."""
    async with httpx.AsyncClient(headers=authorization(writer.key), timeout=_TIMEOUT_S) as http:
        body = {"model": writer.model, "messages": messages, "response_format": _FORMAT}
        response = await http.post(f"{writer.api_base.rstrip('/')}/chat/completions", json=body)
    response.raise_for_status()
    try:
        return str(response.json()["choices"][0]["message"]["content"] or "")
    except (ValueError, LookupError, TypeError):
        return ""


def parse_scenarios(reply: str) -> list[Scenario]:
    """Return the scenarios in a reply, whatever text surrounds the JSON; none if it is not as asked for."""
    try:
        entries = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])["scenarios"]
        return [make_scenario(str(entry["task"]).strip(), entry["difficulty"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []


def is_new(candidate: Scenario, existing: Sequence[Scenario]) -> bool:
    """Return whether less than four fifths of its words are those of any existing scenario (Jaccard index)."""
    words = _words(candidate.task)
    others = [_words(s.task) for s in existing]
    return all(len(words & other) < _MAX_OVERLAP * max(len(words | other), 1) for other in others)


def _words(task: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.lower()))


def read_scenarios(path: Path) -> list[Scenario]:
    """Read a file of scenarios; an empty list if there is none. Raises `ValueError` naming the line."""
    if not path.exists():
        return []
    scenarios = []
    with path.open(encoding="utf-8") as lines:  # `splitlines` also splits at U+2028, which JSON may hold
        for number, line in enumerate(lines, 1):
            try:
                scenarios.append(Scenario(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return scenarios


def _save(path: Path, scenarios: Sequence[Scenario]) -> None:
    """Replace the file as a whole: an interruption leaves what it held before, or all of `scenarios`."""
    whole = path.with_name(f"{path.name}.part")
    whole.write_text("".join(json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in scenarios), "utf-8")
    whole.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 1 if there are fewer scenarios than were asked for, 2 if an argument cannot be used."""
    parser = argparse.ArgumentParser(
        prog="journeywork scenarios", description="Write training tasks from a description of the agent."
    )
    parser.add_argument("--describe", type=Path, required=True, help="file that says what the agent is for")
    parser.add_argument("--count", type=at_least_one, default=50)
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSONL")
    parser.add_argument("--append", action="store_true", help="keep what the file holds already")
    parser.add_argument("--model", required=True, help="the model that writes them, as its server calls it")
    parser.add_argument("--api-base", default="https://api.openai.com/v1", help="an OpenAI-compatible server")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", help="environment variable with its key")
    args = parser.parse_args(argv)
    with exit_status((ValueError, OSError), ()):
        if args.out.exists() and not args.append:
            raise ValueError(f"{args.out} exists: --append keeps what it holds, or name another file")
        if not (key := os.environ.get(args.api_key_env, "")):
            raise ValueError(f"--api-key-env: the environment has no {args.api_key_env}")
        writer = Writer(args.model, args.api_base, key)
        existing, failure = read_scenarios(args.out), ""
        try:
            description, keep = args.describe.read_text("utf-8").strip(), partial(_save, args.out)
            anyio.run(write_scenarios, writer, description, args.count, existing, keep)
        except ScenarioError as error:
            failure = str(error)
        written = len(read_scenarios(args.out))
    sys.stdout.write(json.dumps({"out": str(args.out), "scenarios": written}) + "\n")
    if failure:
        sys.stderr.write(f"journeywork: {failure}\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
