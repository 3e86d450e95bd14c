"""Every event to a Delta Lake, and SQL over it.

| module or room | what lives there |
| --- | --- |
| `service` | the service: a writer for each consumer, maintenance, alarms |
| `lake/` | what writes: the Delta tables, their storage, the writer, maintenance |
| `reading/` | what readers share: the views, SQL, and a run as rows |
| `showing/` | what shows a run: the dashboard |
| `commands/` | `journeywork replay`, `diff` and `what-if` |
| `evidence/` | comparisons of two versions in use: `journeywork decide` |
| `datasets/` | runs as data sets for supervised trainers: `journeywork dataset` |
| `erasure/` | a person's runs are deleted from log, lake and data sets: `journeywork erase` |
| `alarms/` | conditions that are reported to an operator |
| `docs` | `journeywork docs`: writes the reference pages |
"""
