"""An agent with tools that answers questions about a SQLite database, with RULER as its judge.

| module | what lives there |
| --- | --- |
| `shop` | the database of a scenario, its question, the tools and the right answer |
| `train` | the script: the agent, its training, the comparison |
| `stand_in` | what the stand-in for a judge model says of an attempt |
| `make_model` | makes the tiny base model |
"""
