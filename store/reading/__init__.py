"""The history as its readers see it.

| module | what lives there |
| --- | --- |
| `views` | the documented views |
| `sql` | DuckDB over the lake; `journeywork sql` |
| `rebuild` | converts rows back to events |
| `options` | what the commands over the history share |
"""
