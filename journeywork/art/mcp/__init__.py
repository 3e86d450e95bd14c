"""Tools of MCP servers, and scenarios made of them.

| module | contents |
| --- | --- |
| `types` | tools, resources, scenarios |
| `generate_scenarios` | scenarios that a model makes of a list of tools |
| `default_tools` | the tool that ends a task |
"""

from journeywork.art.mcp.default_tools import complete_task_tool
from journeywork.art.mcp.generate_scenarios import generate_scenarios
from journeywork.art.mcp.types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool

__all__ = [
    "GeneratedScenario",
    "GeneratedScenarioCollection",
    "MCPResource",
    "MCPTool",
    "complete_task_tool",
    "generate_scenarios",
]
