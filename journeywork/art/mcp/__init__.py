"""Tools of MCP servers, and scenarios made of them.

| module | contents |
| --- | --- |
| `types` | tools, resources, scenarios |
| `generate_scenarios` | scenarios that a model makes of a list of tools |
"""

from journeywork.art.mcp.generate_scenarios import generate_scenarios
from journeywork.art.mcp.types import GeneratedScenario, GeneratedScenarioCollection, MCPResource, MCPTool

__all__ = ["GeneratedScenario", "GeneratedScenarioCollection", "MCPResource", "MCPTool", "generate_scenarios"]
