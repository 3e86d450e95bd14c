"""Several gateway processes on one port (`gateway.workers`). Nothing here knows what the gateway's calls mean, and this
room imports no other room.

| module | what lives there |
| --- | --- |
| `handover` | passes accepted connections from the owner of the port to the worker with the fewest |
| `link` | questions and answers between the owner and a worker |
| `siblings` | a worker's place among the others: asks all of them |
| `pages` | merges the metrics of all workers into one page |
| `owner` | starts, checks, restarts and stops the workers |
"""
