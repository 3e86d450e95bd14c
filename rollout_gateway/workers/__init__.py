"""Several gateway processes on one port (`gateway.workers`). This room imports no other room and knows nothing of the
calls that the gateway serves.

| module | what lives there |
| --- | --- |
| `owner` | the process that owns the port: starts, checks, restarts and stops the workers |
| `handover` | passes accepted connections from the owner to the worker with the fewest |
| `rpc` | remote calls between the owner and a worker |
| `group` | a worker's calls to all other workers |
| `merged_metrics` | merges the metrics of all workers into one page |
"""
