"""Commands for users.

| module | command |
| --- | --- |
| `cli` | `journeyman judge`, which has the two next ones |
| `options` | the options that all of them have |
| `eval` | `journeyman judge eval`: a judge's agreement with known rewards |
| `score` | `journeyman judge score`: one group from a file or from user code |
| `rejudge` | `journeyman rejudge`: history scored again |
| `scenarios` | `journeyman scenarios`: training tasks from a description |
"""
