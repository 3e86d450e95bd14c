"""Curves of an installation, in files of the run directory: one point per training step, exactly once.

| module | what it holds |
| --- | --- |
| `rows` | a checkpoint or an evaluation as a row of figures, with ART's names as aliases |
| `metrics_file` | `metrics.jsonl`: the rows, and what is known of them after a restart |
| `trackers` | W&B, behind the protocol of a tracker |
| `sending` | rows on their way to a tracker |
| `task` | the task of the store service that follows the log |
"""
