"""Tools of MCP servers, and scenarios made of them."""
