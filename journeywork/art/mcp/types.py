"""Tools and resources of MCP servers, and scenarios for agents that use them.

MCP is a protocol by which a server offers *tools* (functions that a model may call) and *resources* (documents that it
may read). A *scenario* is a task for an agent with these tools, with a difficulty from 1 to 5."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class MCPTool:
    """A tool of an MCP server."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of its arguments."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MCPTool:
        """Make a tool of a dictionary. The schema may also be called `inputSchema`, as in the protocol."""
        parameters = data.get("parameters") or data.get("inputSchema") or {}
        return cls(str(data["name"]), str(data.get("description") or ""), dict(parameters))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": self.parameters}

    def to_tool_schema(self) -> dict[str, Any]:
        """Return the tool as `tools` of a chat completion takes it."""
        return {"type": "function", "function": self.to_dict()}


@dataclass
class MCPResource:
    """A resource of an MCP server."""

    uri: str
    name: str
    description: str
    mime_type: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MCPResource:
        """Make a resource of a dictionary. The type may also be called `mimeType`, as in the protocol."""
        return cls(
            str(data["uri"]),
            str(data.get("name") or ""),
            str(data.get("description") or ""),
            data.get("mime_type") or data.get("mimeType"),
        )

    def to_dict(self) -> dict[str, Any]:
        shown = {"uri": self.uri, "name": self.name, "description": self.description}
        return shown if self.mime_type is None else {**shown, "mimeType": self.mime_type}


@dataclass
class GeneratedScenario:
    """A task for an agent, from 1 (easy) to 5 (hard)."""

    task: str
    difficulty: int


class GeneratedScenarioCollection:
    """A list of scenarios."""

    def __init__(self, scenarios: Sequence[GeneratedScenario]) -> None:
        self.scenarios = list(scenarios)

    def to_dicts(self) -> list[dict[str, Any]]:
        return [{"task": scenario.task, "difficulty": scenario.difficulty} for scenario in self.scenarios]

    def __len__(self) -> int:
        return len(self.scenarios)

    def __iter__(self) -> Iterator[GeneratedScenario]:
        return iter(self.scenarios)

    def __getitem__(self, index: int) -> GeneratedScenario:
        return self.scenarios[index]

    def shuffle(self) -> GeneratedScenarioCollection:
        """Return the scenarios in a random order."""
        return GeneratedScenarioCollection(random.sample(self.scenarios, len(self.scenarios)))
