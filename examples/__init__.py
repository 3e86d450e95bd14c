"""Worked examples: each folder is one task, with its agent and what it needs; nothing here is part of the product.

| folder | what it shows |
| --- | --- |
| `tictactoe` | agents that learn to beat a random opponent, with every part of the system (`make demo`) |
"""
