"""Tools and resources of MCP servers, and scenarios for agents that use them."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, overload

from journeywork.scenarios import DIFFICULTIES

log = logging.getLogger("journeywork.art")


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
    """A task for an agent, from 1 (easy) to 5 (hard). Raises `ValueError` for another difficulty."""

    task: str
    difficulty: int

    def __post_init__(self) -> None:
        if type(self.difficulty) is not int or self.difficulty not in DIFFICULTIES:
            raise ValueError(f"difficulty must be a whole number from 1 to 5, not {self.difficulty!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GeneratedScenario:
        return cls(str(data["task"]), data["difficulty"])

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, "difficulty": self.difficulty}

    def preview(self, max_length: int = 120) -> str:
        """Return the task, cut after `max_length` characters."""
        return self.task if len(self.task) <= max_length else self.task[:max_length] + "…"


class GeneratedScenarioCollection:
    """A list of scenarios."""

    def __init__(self, scenarios: Sequence[GeneratedScenario]) -> None:
        self.scenarios = list(scenarios)

    @classmethod
    def from_dicts(cls, data: Sequence[Mapping[str, Any]]) -> GeneratedScenarioCollection:
        return cls([GeneratedScenario.from_dict(item) for item in data])

    @classmethod
    def from_json(cls, json_str: str) -> GeneratedScenarioCollection:
        """Read `{"scenarios": [...]}` or the list alone."""
        data = json.loads(json_str)
        return cls.from_dicts(data["scenarios"] if isinstance(data, dict) else data)

    def to_dicts(self) -> list[dict[str, Any]]:
        return [scenario.to_dict() for scenario in self.scenarios]

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({"scenarios": self.to_dicts()}, indent=indent)

    def __len__(self) -> int:
        return len(self.scenarios)

    def __iter__(self) -> Iterator[GeneratedScenario]:
        return iter(self.scenarios)

    @overload
    def __getitem__(self, index: int) -> GeneratedScenario: ...

    @overload
    def __getitem__(self, index: slice) -> list[GeneratedScenario]: ...

    def __getitem__(self, index: int | slice) -> GeneratedScenario | list[GeneratedScenario]:
        return self.scenarios[index]

    def shuffle(self) -> GeneratedScenarioCollection:
        """Return the scenarios in a random order."""
        return GeneratedScenarioCollection(random.sample(self.scenarios, len(self.scenarios)))

    def split(self, train_size: int) -> tuple[GeneratedScenarioCollection, GeneratedScenarioCollection]:
        """Return the first `train_size` scenarios, and the others. Raises `ValueError` for another size."""
        if not 0 <= train_size <= len(self):
            raise ValueError(
                f"train_size is {train_size}, but must be from 0 to {len(self)}, the number of scenarios"
            )
        return (
            GeneratedScenarioCollection(self.scenarios[:train_size]),
            GeneratedScenarioCollection(self.scenarios[train_size:]),
        )

    def filter_by_difficulty(
        self, min_difficulty: int = 1, max_difficulty: int = 5
    ) -> GeneratedScenarioCollection:
        """Return the scenarios with a difficulty in this range."""
        return GeneratedScenarioCollection(
            [s for s in self.scenarios if min_difficulty <= s.difficulty <= max_difficulty]
        )

    def get_difficulty_distribution(self) -> Counter[int]:
        """Return the number of scenarios of each difficulty."""
        return Counter(scenario.difficulty for scenario in self.scenarios)

    def get_summary(self) -> dict[str, Any]:
        """Return number, difficulties and mean length of the tasks in characters."""
        return {
            "total_scenarios": len(self),
            "difficulty_distribution": dict(self.get_difficulty_distribution()),
            "avg_difficulty": fmean(s.difficulty for s in self.scenarios) if self.scenarios else 0.0,
            "avg_task_length": fmean(len(s.task) for s in self.scenarios) if self.scenarios else 0.0,
        }

    def preview(self, n: int = 5, max_task_length: int = 120) -> None:
        """Log the first `n` scenarios."""
        for number, scenario in enumerate(self.scenarios[:n], 1):
            log.info("%d. %s (difficulty %d)", number, scenario.preview(max_task_length), scenario.difficulty)

    def print_difficulty_distribution(self) -> None:
        """Log the number of scenarios of each difficulty."""
        counts = self.get_difficulty_distribution()
        log.info("difficulties: %s", ", ".join(f"{d}: {counts[d]}" for d in DIFFICULTIES))
