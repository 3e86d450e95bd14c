"""Public environments of the library verifiers 0.4, trained as prime-rl's recipes do.

| module | what lives there |
| --- | --- |
| `recipes` | model, sizes and rate of each environment's recipe, and what prime-rl reached with it |
| `demo` | `python -m examples.environments.demo NAME`: starts everything, trains, writes `report.json` |
| `play` | the rollouts, in a Python environment of its own: verifiers needs other versions than the services |
"""
