"""Every event to a Delta Lake, and SQL over it.

| module or room | what lives there |
| --- | --- |
| `service` | the service: a writer for each consumer, upkeep |
| `writer` | one consumer to the lake: decode, commit, then acknowledge |
| `columns` | events to Arrow tables |
| `rebuild` | events from Parquet |
| `lake` | the tables of all tags, ready to be written or read |
| `table` | one tag's Delta table: commits, and what it holds already |
| `commits` | the parts of a commit, and what the journal says |
| `place` | a folder or object storage; the store's errors |
| `upkeep` | merges files, deletes old ones, makes checkpoints |
| `healing` | finds and undoes what a power cut did |
| `repair` | writes the events of damaged files again from the log |
| `older` | takes over the files of stores from before Delta Lake |
| `views` | the documented views |
| `sql` | DuckDB over the lake; `journeyman sql` |
| `replay` | `journeyman replay`: groups of the history on a branch |
| `diff` | `journeyman diff`: two sets of verdicts compared |
| `curves` | JSONL and TensorBoard files of the training steps |
| `alarms` | conditions that an operator should know of |
| `dashboard` | web pages over the history; `journeyman ui` |
| `show` | one trajectory or group as text |
| `watch` | the live view in the terminal; `journeyman watch` |
| `docs` | generates docs/store.md and the answers of docs/questions.md |
"""
