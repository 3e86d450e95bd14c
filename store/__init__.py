"""Every event to a Delta Lake, and SQL over it.

| module or room | what lives there |
| --- | --- |
| `service` | the service: a writer for each consumer, maintenance, curves, alarms |
| `writer` | writes the events of one consumer: decode, commit, then acknowledge |
| `columns` | converts events to Arrow tables |
| `rebuild` | converts Parquet rows back to events |
| `lake` | the Delta tables of all event tags |
| `table` | the Delta table of one tag: commits, and which events it holds |
| `commits` | builds and reads Delta commits |
| `storage` | a local folder or object storage; the store's errors |
| `maintenance` | merges files, deletes old ones, makes checkpoints |
| `recovery` | finds what a power cut did to a table |
| `repair` | writes the events of damaged files again from the log |
| `legacy` | reads and imports stores from before Delta Lake |
| `reading/` | what readers share: the views, SQL, and a run as rows |
| `showing/` | what shows a run: the dashboard, `journeywork watch` and `show`, curves and trackers |
| `replay` | `journeywork replay`: groups of the history on a branch |
| `diff` | `journeywork diff`: two sets of verdicts compared |
| `alarms/` | conditions that are reported to an operator |
| `docs` | generates docs/store.md and the answers of docs/questions.md |
"""
