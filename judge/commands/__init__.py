"""Commands for users.

| module | command |
| --- | --- |
| `main` | `journeywork judge`, which has the three next ones |
| `eval` | `journeywork judge eval`: a judge's agreement with known rewards |
| `score` | `journeywork judge score`: one group from a file or from user code |
| `serve` | `journeywork judge serve`: groups that a program sends |
| `rejudge` | `journeywork rejudge`: history scored again |
"""
