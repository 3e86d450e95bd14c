"""The control API: its routes, their handlers, bodies and answers. Clients open, complete, grade and read runs by it,
and operators decide about versions. Model calls are not routes: `app` takes them.

| module | what lives there |
| --- | --- |
| `gateway` | the parts of a gateway, and a request, as every handler gets them |
| `routes` | the table: each path with its handler and the key that it takes |
| `schemas` | the bodies |
| `trajectories` | opening, completing and reading trajectories |
| `demonstrations` | conversations that the model did not have, as calls |
| `groups` | completing a group, making its runs of recorded calls, what became of it |
| `feedback` | feedback on runs and answers, recorded as signals |
| `records` | evaluations, recorded |
| `models` | models, versions, decisions, the state of the servers |
| `tokens` | token counts |
| `metrics` | metrics for Prometheus |
| `log_health` | whether the log takes writes |
"""
