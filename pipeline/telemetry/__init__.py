"""Log lines, and traces made from the events of the log.

| module | what it holds |
| --- | --- |
| `logs` | structured log lines: one JSON object a line |
| `spans` | events to OpenTelemetry spans, with the attributes that Langfuse reads |
| `exporter` | the service that reads the log and exports spans over OTLP |
"""
