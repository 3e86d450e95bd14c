"""Tic-tac-toe against a random opponent: the demo's task, small enough for two cores and verifiable to the last move.

| module | what lives there |
| --- | --- |
| `game` | rules, the seeded opponent, what the model sees, what a game is worth |
| `make_model` | makes `model/`: the tokenizer and a small pre-trained Qwen3, from a seed |
| `agent` | agents that play with an OpenAI client |
| `demo` | `make demo-game`: starts everything, trains, evaluates, writes `report.json` |
| `job` | the same without rehearsal: each game once, results a minute later |
| `held_out` | the held-out games, also for `journeywork eval` |
| `report` | the report's figures, and the queries over the run's history |
| `model/` | what `make_model` made |
| `journeywork.toml` | the demo's settings |
"""
