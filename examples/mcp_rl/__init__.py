"""From an MCP server to a model that uses its tools, with RULER as its judge.

| module | what lives there |
| --- | --- |
| `server` | a small MCP server over the orders of a shop |
| `shop` | the shop's database, a question about it, and the tools |
| `train` | the script; `examples/notebooks/mcp_rl.ipynb` is the notebook |
| `stand_in` | what the stand-in for a judge model says of an attempt |
| `make_model` | makes the tiny base model |
"""
