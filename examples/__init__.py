"""Worked examples: each folder holds one task and its agent. Nothing here is part of the product.

| folder | what it shows |
| --- | --- |
| `common` | what the examples share: a small model from a package, a running installation, recorded learning curves |
| `inbox` | a language model learns to sort a shop's inbox (`make demo`) |
| `apprentice` | the same job by a provider's model, then by a small one (`make apprentice`) |
| `tictactoe` | agents that learn to beat a random opponent, with every part of the system (`make demo-game`) |
| `environments` | public environments of verifiers, with prime-rl's recipes |
| `notebooks` | training, and the history in SQL, as notebooks |
"""
