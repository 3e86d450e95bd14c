"""Tools of MCP servers, and scenarios made of them.

| module | contents |
| --- | --- |
| `types` | tools, resources, scenarios |
| `generate_scenarios` | scenarios that a model makes of a list of tools |
"""

from journeywork.art.mcp.generate_scenarios import generate_scenarios as generate_scenarios
from journeywork.art.mcp.types import GeneratedScenario as GeneratedScenario
from journeywork.art.mcp.types import GeneratedScenarioCollection as GeneratedScenarioCollection
from journeywork.art.mcp.types import MCPResource as MCPResource
from journeywork.art.mcp.types import MCPTool as MCPTool
