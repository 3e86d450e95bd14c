"""Traces made from the events of the log.

| module | what it holds |
| --- | --- |
| `exporter` | the service that reads the log and exports spans and scores |
| `backend` | where spans are sent, in requests of a bounded size |
| `trace` | ids of traces and spans, and what every span of a trajectory carries |
| `spans` | events to OpenTelemetry spans, by the GenAI conventions, with the attributes that Langfuse reads |
| `content` | prompts and replies in spans |
| `langfuse` | events to Langfuse scores, written to Langfuse |
"""
