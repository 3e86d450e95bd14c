"""Have a model think of tasks that the tools of an MCP server can do.

A model behind an OpenAI-compatible server writes them in batches and is shown the tasks that exist already, so that new
ones differ.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from journeywork.art.mcp.types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool
from journeywork.transport import authorization

log = logging.getLogger("journeywork.art")

DIFFICULTIES = range(1, 6)
_BATCH = 10
_MAX_SHOWN = 40
"""Existing tasks that the model is shown."""
_MAX_FRUITLESS = 3
"""Replies in a row without a new scenario after which the model is considered out of ideas."""
_MOST_ALIKE = 0.9
"""Ratio of `difflib` above which two tasks are the same."""
_TIMEOUT_S = 600.0

_SYSTEM = """\
You write training tasks for an AI agent that has the tools and resources of a server.

Tools:
{tools}

Resources:
{resources}

- Every task can be done with these tools. It does not name them.
- Cover different tools and combinations: difficulty 1 takes one call, 5 takes many and an analysis.
- Say in every task that the agent is to end with a summary of what it found.
{more}
Write tasks that differ in what they ask, in detail and in difficulty, each complete in itself and solvable by this
agent, some hard. Do not solve them. Answer with one JSON object and nothing else:
{{"scenarios": [{{"task": "<what the agent is asked>", "difficulty": <1 (easy) to 5 (hard)>}}]}}"""


def _object_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_ENTRY = _object_schema(task={"type": "string"}, difficulty={"type": "integer", "enum": list(DIFFICULTIES)})
_SCHEMA = _object_schema(scenarios={"type": "array", "items": _ENTRY})
_FORMAT = {"type": "json_schema", "json_schema": {"name": "scenarios", "strict": True, "schema": _SCHEMA}}


def preview_scenarios(scenarios: Sequence[Mapping[str, Any]], n: int = 5) -> None:
    """Log the first `n` of these scenarios. Raises `KeyError` for one without `task` or `difficulty`."""
    for number, scenario in enumerate(scenarios[:n], 1):
        task = str(scenario["task"])
        log.info("%d. %.120s (difficulty %d)", number, task, scenario["difficulty"])


async def generate_scenarios(
    tools: Sequence[MCPTool] | Sequence[Mapping[str, Any]],
    resources: Sequence[MCPResource] | Sequence[Mapping[str, Any]] = (),
    num_scenarios: int = 24,
    show_preview: bool = True,
    custom_instructions: str | None = None,
    generator_model: str = "openai/gpt-4.1-mini",
    generator_api_key: str | None = None,
    generator_base_url: str = "https://openrouter.ai/api/v1",
) -> GeneratedScenarioCollection:
    """Return `num_scenarios` tasks for an agent with these tools, which differ from each other.

    `generator_model` is asked at `generator_base_url`, an OpenAI-compatible server. The key defaults to
    $OPENROUTER_API_KEY. `show_preview` logs some of the tasks. Raises `ValueError` without a key, without tools and
    resources, and if the server fails or the model writes no new tasks any more."""
    if not tools and not resources:
        raise ValueError("no tools and no resources: there is nothing to make scenarios of")
    key = generator_api_key or os.environ.get("OPENROUTER_API_KEY")
    if not key:
        raise ValueError("no key for the generator: pass generator_api_key, or set OPENROUTER_API_KEY")
    known_tools = [t if isinstance(t, MCPTool) else MCPTool.from_dict(t) for t in tools]
    known_resources = [r if isinstance(r, MCPResource) else MCPResource.from_dict(r) for r in resources]
    system = _SYSTEM.format(
        tools=json.dumps([tool.to_dict() for tool in known_tools], indent=1),
        resources=json.dumps([resource.to_dict() for resource in known_resources], indent=1),
        more=f"- {custom_instructions}\n" if custom_instructions else "",
    )
    url = f"{generator_base_url.rstrip('/')}/chat/completions"
    scenarios: list[GeneratedScenario] = []
    fruitless = 0
    async with httpx.AsyncClient(headers=authorization(key), timeout=_TIMEOUT_S) as http:
        while len(scenarios) < num_scenarios:
            request = f"Write {min(_BATCH, num_scenarios - len(scenarios))} tasks."
            if scenarios:
                shown = "\n".join(f"- {s.task[:200]}" for s in scenarios[-_MAX_SHOWN:])
                request += f" They must differ from these:\n{shown}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
            body = {"model": generator_model, "messages": messages, "response_format": _FORMAT}
            try:
                reply = (await http.post(url, json=body)).raise_for_status()
            except httpx.HTTPError as error:
                raise ValueError(f"{generator_base_url}: {error}") from error
            before = len(scenarios)
            for candidate in _parse_scenarios(reply):
                if len(scenarios) < num_scenarios and _is_new(candidate, scenarios):
                    scenarios.append(candidate)
            fruitless = 0 if len(scenarios) > before else fruitless + 1
            if fruitless == _MAX_FRUITLESS:
                raise ValueError(
                    f"{generator_model} wrote {before} of {num_scenarios} scenarios, then nothing new in {fruitless} "
                    "replies"
                )
    collection = GeneratedScenarioCollection(scenarios)
    if show_preview:
        preview_scenarios(collection.to_dicts())
    return collection


def _parse_scenarios(reply: httpx.Response) -> list[GeneratedScenario]:
    """Return the scenarios in a chat completion, whatever text surrounds the JSON; none if it is not as asked for."""
    try:
        text = str(reply.json()["choices"][0]["message"]["content"])
        entries = json.loads(text[text.find("{") : text.rfind("}") + 1])["scenarios"]
        scenarios = [GeneratedScenario(str(entry["task"]).strip(), entry["difficulty"]) for entry in entries]
    except (ValueError, LookupError, TypeError):
        return []
    return scenarios if all(s.difficulty in DIFFICULTIES for s in scenarios) else []


def _is_new(candidate: GeneratedScenario, existing: Sequence[GeneratedScenario]) -> bool:
    """Return whether no existing task is nearly the same."""
    known = [scenario.task.casefold() for scenario in existing]
    return not difflib.get_close_matches(candidate.task.casefold(), known, n=1, cutoff=_MOST_ALIKE)
