"""A server of the Model Context Protocol with one tool, for agents that take their tools from there."""

import os
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver import MCPServer

server = MCPServer("games")


@server.tool()
def move(cell: Literal["a1", "b2"]) -> str:
    """Play a cell."""
    with Path(os.environ["GAME_LOG"]).open("a") as log:
        log.write(f"{cell}\n")
    return "ok"


server.run()
