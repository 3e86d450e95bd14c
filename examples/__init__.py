"""Worked examples: each folder is one task, with its agent and what it needs; nothing here is part of the product.

| folder | what it shows |
| --- | --- |
| `tictactoe` | a fleet of agents that learns to beat a random opponent, through every part of the system (`make demo`) |
"""
