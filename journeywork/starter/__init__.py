"""`journeywork init NAME`: a starter project that runs.

| module | contents |
| --- | --- |
| `command` | the command |
| `template/` | the project's files; `starter_model` in them becomes the project's name |
"""
