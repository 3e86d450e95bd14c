"""A tool that agents get beside those of a server."""

from journeywork.art.mcp.types import MCPTool

complete_task_tool = MCPTool(
    name="complete_task",
    description="End the task.",
    parameters={
        "type": "object",
        "properties": {"summary": {"type": "string", "description": "What was done and found."}},
        "required": ["summary"],
    },
)
"""The call with which an agent says that it is done."""
