"""Log lines.

| module | what it holds |
| --- | --- |
| `logs` | structured log lines: one JSON object a line |
"""
