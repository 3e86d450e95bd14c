"""From an MCP server to a model that uses its tools.

`train` is the script, `server` a small MCP server, `examples/notebooks/mcp_rl.ipynb` the notebook."""
