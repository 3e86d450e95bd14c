"""An MCP server over the orders of a shop, with the tools `schema` and `query`.

python -m examples.mcp_rl.server     # speaks the Model Context Protocol on its standard input and output
"""

from __future__ import annotations

import random

from mcp.server.mcpserver import MCPServer

from examples.mcp_rl.shop import CITIES, ITEMS, QUESTIONS, Scenario

_draw = random.Random("orders")
_ORDERS = tuple((item, city, _draw.randint(1, 24)) for item in ITEMS for city in CITIES for _ in range(3))
SHOP = Scenario("count", ITEMS[0], CITIES[0], "price", _ORDERS)
PAIRS = [(item, CITIES[(n + shift) % len(CITIES)], shift) for shift in range(4) for n, item in enumerate(ITEMS)]
TASKS = [f"{list(QUESTIONS.values())[shift]} for {item} from {city}?" for item, city, shift in PAIRS]
"""What a stand-in for a model asks about it."""

# The level is also that of a program that imports this module: with INFO it would log every HTTP request.
server = MCPServer("shop", log_level="WARNING")


@server.tool()
def schema() -> str:
    """Show the table's name and its columns."""
    return SHOP.call("schema", {})


@server.tool()
def query(sql: str) -> str:
    """Run one SQL query and show its result."""
    return SHOP.call("query", {"sql": sql})


if __name__ == "__main__":
    server.run()
