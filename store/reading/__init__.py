"""The history as its readers see it: views, SQL, and the rows of a run, each told once for pages, terminal and text.

| module | what lives there |
| --- | --- |
| `views` | the documented views |
| `sql` | DuckDB over the lake; `journeywork sql` |
| `rebuild` | converts rows back to events |
| `history` | one DuckDB over the views, refreshed as files appear |
| `summary` | a run in sentences, and its raised alarms |
| `intervals` | 95 % intervals of means |
| `overview` | a run as a whole: counts, curves; two branches compared |
| `groups` | groups, one group |
| `trajectories` | trajectories, one trajectory with its calls and tokens |
| `checkpoints` | checkpoints, one checkpoint, decisions |
| `judge` | what was measured of judges |
| `what_if` | what would have been learned under other settings |
| `events` | one event as it is stored |
| `lists` | filters, order and paging of lists |
| `chat` | requests and replies of calls, as they are recorded |
| `texts` | values as text, rows as JSON |
| `errors` | what a reader asked for and can't get |
| `options` | what the commands over the history share |

A function of these modules takes the history, the name of what it reads (if it reads one thing) and a query: filters
and order by name. It returns a dictionary that pages render and that `.json` addresses and `--json` return.
"""
