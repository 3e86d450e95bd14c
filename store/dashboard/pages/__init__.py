"""The data of each page, as a dictionary that its template renders and that `<page>.json` returns.

| module | pages |
| --- | --- |
| `overview` | overview, compare |
| `groups` | groups, one group |
| `trajectories` | trajectories, one trajectory |
| `checkpoints` | checkpoints, one checkpoint, decisions |
| `judge` | judge |
| `events` | one event as it is stored |
| `lists` | filters, order and paging of lists |
| `chat` | requests and replies of calls, as they are recorded |

A page's function takes the history, the name of what it shows (if it shows one thing) and the address's query. It
raises `PageError`.
"""
