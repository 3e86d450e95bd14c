"""Every event to Parquet, and SQL over it.

| module or room | what lives there |
| --- | --- |
| `service` | the service: a writer for each consumer, compaction |
| `writer` | one consumer to files: decode, write, then acknowledge |
| `columns` | events to Arrow tables |
| `rebuild` | events from Parquet |
| `catalog` | file names, which files are live, which sequences they hold |
| `target` | what the store needs of a place for files; its errors |
| `local`, `objects` | a folder, and object storage |
| `location` | opens the place that the settings name |
| `compaction` | merges small files, deletes old ones |
| `repair` | writes damaged files again from the log |
| `views` | the documented views |
| `sql` | DuckDB over the files; `journeyman sql` |
| `replay` | `journeyman replay`: groups of the history on a branch |
| `diff` | `journeyman diff`: two sets of verdicts compared |
| `curves` | JSONL and TensorBoard files of the training steps |
| `alarms` | conditions that an operator should know of |
| `dashboard` | web pages over the history; `journeyman ui` |
| `show` | one trajectory or group as text |
| `watch` | the live view in the terminal; `journeyman watch` |
| `docs` | generates docs/store.md and the answers of docs/questions.md |
"""
