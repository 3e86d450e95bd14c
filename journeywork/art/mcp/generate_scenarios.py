"""Have a model think of tasks that the tools of an MCP server can do."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from journeywork.art.mcp.types import GeneratedScenarioCollection, MCPResource, MCPTool

_PROMPT = """\
Below are the tools and resources of a server. Write {count} tasks that a user would give an agent with these tools.

Tools:
{tools}

Resources:
{resources}

Rules:
- Every task can be done with these tools. It does not name them.
- Cover different tools and combinations, and a range of difficulties: 1 takes one call, 5 takes many and an analysis.
- Say in every task that the agent is to end with a summary of what it found.
{more}
Answer with JSON: {{"scenarios": [{{"task": "...", "difficulty": 1}}, ...]}} with exactly {count} entries."""


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
    """Return `num_scenarios` tasks for an agent with these tools.

    `generator_model` is asked at `generator_base_url`, an OpenAI-compatible server. The key defaults to
    $OPENROUTER_API_KEY. `show_preview` logs some of the tasks. Raises `ValueError` without a key, without tools and
    resources, and if the model's reply does not hold so many scenarios."""
    if not tools and not resources:
        raise ValueError("no tools and no resources: there is nothing to make scenarios of")
    key = generator_api_key or os.environ.get("OPENROUTER_API_KEY")
    if not key:
        raise ValueError("no key for the generator: pass generator_api_key, or set OPENROUTER_API_KEY")
    known_tools = [t if isinstance(t, MCPTool) else MCPTool.from_dict(t) for t in tools]
    known_resources = [r if isinstance(r, MCPResource) else MCPResource.from_dict(r) for r in resources]
    prompt = _PROMPT.format(
        count=num_scenarios,
        tools=json.dumps([tool.to_dict() for tool in known_tools], indent=1),
        resources=json.dumps([resource.to_dict() for resource in known_resources], indent=1),
        more=f"- {custom_instructions}\n" if custom_instructions else "",
    )
    async with AsyncOpenAI(base_url=generator_base_url, api_key=key) as client:
        completion = await client.chat.completions.create(
            model=generator_model,
            messages=[{"role": "user", "content": prompt}],
            response_format={"type": "json_schema", "json_schema": _FORMAT},
        )
    made = GeneratedScenarioCollection.from_json(completion.choices[0].message.content or "{}")
    if len(made) != num_scenarios:
        raise ValueError(f"{generator_model} made {len(made)} scenarios, not {num_scenarios}")
    if show_preview:
        made.preview()
    return made


_FORMAT: Any = {
    "name": "scenarios",
    "strict": True,
    "schema": {
        "type": "object",
        "additionalProperties": False,
        "required": ["scenarios"],
        "properties": {
            "scenarios": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["task", "difficulty"],
                    "properties": {
                        "task": {"type": "string"},
                        "difficulty": {"type": "integer", "minimum": 1, "maximum": 5},
                    },
                },
            }
        },
    },
}
