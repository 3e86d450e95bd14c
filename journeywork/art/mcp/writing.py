"""Has a model write tasks for an agent, for `generate_scenarios`.

A model behind an OpenAI-compatible server writes them in batches and is shown the tasks that exist already, so that new
ones differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from journeywork.art.mcp.types import GeneratedScenario
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
class Writer:
    """A model that writes scenarios."""

    model: str
    """As its server calls it."""
    api_base: str
    """URL of an OpenAI-compatible server."""
    key: str


async def write_scenarios(writer: Writer, description: str, count: int) -> list[GeneratedScenario]:
    """Return `count` scenarios; near-duplicates are left out.

    Raises `ScenarioError` if the model writes no new ones any more or its server fails."""
    scenarios: list[GeneratedScenario] = []
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
        fruitless = 0 if len(scenarios) > before else fruitless + 1
        if fruitless == _MAX_FRUITLESS:
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


def parse_scenarios(reply: str) -> list[GeneratedScenario]:
    """Return the scenarios in a reply, whatever text surrounds the JSON; none if it is not as asked for."""
    try:
        entries = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])["scenarios"]
        scenarios = [GeneratedScenario(str(entry["task"]).strip(), entry["difficulty"]) for entry in entries]
    except (ValueError, KeyError, TypeError):
        return []
    return scenarios if all(s.difficulty in DIFFICULTIES for s in scenarios) else []


def is_new(candidate: GeneratedScenario, existing: Sequence[GeneratedScenario]) -> bool:
    """Return whether the Jaccard index of its words with those of each existing scenario is below 0.8."""
    words = _words(candidate.task)
    others = [_words(s.task) for s in existing]
    return all(len(words & other) < _MAX_OVERLAP * max(len(words | other), 1) for other in others)


def _words(task: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", task.lower()))
