"""The control API: its routes, their handlers, bodies and answers.

| module | what lives there |
| --- | --- |
| `gateway` | the parts of a gateway, as every handler gets them |
| `routes` | the table: each path with its handler and the key that it takes |
| `control_request` | a request as its handler gets it |
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
