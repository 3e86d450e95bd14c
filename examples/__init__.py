"""Worked examples: each folder holds one task and its agent. Nothing here is part of the product.

| folder | what it shows |
| --- | --- |
| `common` | what the examples share: tiny base models, a running installation, recorded learning curves |
| `auto_rl`, `mcp_rl` | from a sentence, or an MCP server, to a trained model |
| `corrections` | an agent that learns from a user's words, without any reward |
| `support` | a support agent with a rubric judge, from production to a better version in production |
| `tictactoe` | agents that learn to beat a random opponent, with every part of the system (`make demo`) |
"""
