"""Two agents in a LangGraph, who find a time for a meeting; the trained model plays both.

| module | what lives there |
| --- | --- |
| `calendars` | the task: calendars, what each role sees, rewards |
| `train` | the script: the graph, its training, the comparison |
| `make_model` | makes the tiny base model |
"""
