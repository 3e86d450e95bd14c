"""The control API: its routes, their handlers, bodies and answers.

| module | what lives there |
| --- | --- |
| `routes` | the table: each path with its handler and the key that it takes |
| `schemas` | bodies and answers |
| `control_request` | a request as its handler gets it |
| `trajectories` | opening, completing and reading trajectories |
| `groups` | completing a group, making its runs of recorded calls, what became of it, people's labels |
| `models` | models, versions, decisions, the state of the servers |
| `evaluations` | recording evaluations |
| `tokens` | token counts |
| `metrics` | metrics for Prometheus |
| `log_health` | whether the log takes writes |
"""
