"""Have a model think of tasks that the tools of an MCP server can do."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from journeywork.art.mcp.types import GeneratedScenarioCollection, MCPResource, MCPTool
from journeywork.art.mcp.writing import Writer, write_scenarios

log = logging.getLogger("journeywork.art")

_DESCRIPTION = """\
It has the tools and resources of a server.

Tools:
{tools}

Resources:
{resources}

- Every task can be done with these tools. It does not name them.
- Cover different tools and combinations: difficulty 1 takes one call, 5 takes many and an analysis.
- Say in every task that the agent is to end with a summary of what it found.
{more}"""


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
    """Return `num_scenarios` tasks for an agent with these tools.

    `generator_model` is asked at `generator_base_url`, an OpenAI-compatible server. The key defaults to
    $OPENROUTER_API_KEY. `show_preview` logs some of the tasks. Raises `ValueError` without a key, without tools and
    resources, and if the model does not write so many scenarios."""
    if not tools and not resources:
        raise ValueError("no tools and no resources: there is nothing to make scenarios of")
    key = generator_api_key or os.environ.get("OPENROUTER_API_KEY")
    if not key:
        raise ValueError("no key for the generator: pass generator_api_key, or set OPENROUTER_API_KEY")
    known_tools = [t if isinstance(t, MCPTool) else MCPTool.from_dict(t) for t in tools]
    known_resources = [r if isinstance(r, MCPResource) else MCPResource.from_dict(r) for r in resources]
    description = _DESCRIPTION.format(
        tools=json.dumps([tool.to_dict() for tool in known_tools], indent=1),
        resources=json.dumps([resource.to_dict() for resource in known_resources], indent=1),
        more=f"- {custom_instructions}" if custom_instructions else "",
    )
    writer = Writer(generator_model, generator_base_url, key)
    collection = GeneratedScenarioCollection(await write_scenarios(writer, description, num_scenarios))
    if show_preview:
        preview_scenarios(collection.to_dicts())
    return collection
