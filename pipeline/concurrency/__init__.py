"""Helpers for concurrent work.

| module | what lives there |
| --- | --- |
| `concurrently` | concurrent work over a list |
| `backoff` | pauses between attempts |
"""
