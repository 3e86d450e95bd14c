"""What the pages of the dashboard show, each told once for pages and JSON.

| module | what lives there |
| --- | --- |
| `history` | one DuckDB over the views, refreshed as files appear |
| `takeover` | what an apprentice is worth, in a sentence |
| `summary` | an installation in sentences, and its raised alarms |
| `status` | what `journeywork status` shows of the history |
| `intervals` | 95 % intervals of means |
| `overview` | an installation as a whole: counts, curves; two branches compared |
| `groups` | groups, one group |
| `trajectories` | trajectories, one trajectory with its calls and tokens |
| `checkpoints` | checkpoints, one checkpoint, decisions |
| `judge` | what was measured of judges |
| `shadows` | what an apprentice answers beside an outside model |
| `what_if` | what would have been learned under other settings |
| `lists` | filters, order and paging of lists |
| `chat` | requests and replies of calls, as they are recorded |
| `texts` | values as text, rows as JSON |
| `errors` | the errors that a user sees |

A function of these modules takes the history, the name of what it reads (if it reads one thing) and a query: filters
and order by name. It returns a dictionary that pages render and that `.json` addresses return.
"""
