"""Every event to Parquet, and SQL over it.

| module | what lives there |
| --- | --- |
| `columns` | events to Arrow tables, without a Python object per token |
| `catalog` | file names, which files are live, which sequences they hold |
| `target` | where files go: written whole or not at all |
| `writer` | one consumer to files: decode, write, then acknowledge |
| `compaction` | few large files instead of many small ones; the end of what is kept |
| `heal` | a damaged file, written again from the log |
| `service` | the process: one writer per consumer of the table |
| `views` | the documented views |
| `sql` | DuckDB over the files; the `journeyman sql` command |
"""
