"""Log lines, and traces made from the events of the log.

| module | what it holds |
| --- | --- |
| `logs` | structured log lines: one JSON object a line |
| `counts`, `metrics` | what a process did with the log; `GET /metrics` of a service |
| `exporter` | the service that reads the log and exports spans and scores |
| `backend` | where spans are sent, in requests of a bounded size |
| `trace` | ids of traces and spans, and what every span of a trajectory carries |
| `spans` | events to OpenTelemetry spans, by the GenAI conventions, with the attributes that Langfuse reads |
| `content` | prompts and replies in spans: all, masked or none |
| `scores` | events to Langfuse scores |
| `langfuse` | writes scores to Langfuse |
"""
