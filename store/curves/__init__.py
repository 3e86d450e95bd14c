"""Curves of a run, in files of the run folder: one point per training step, exactly once.

| module | what it holds |
| --- | --- |
| `rows` | a checkpoint as a row of figures, with ART's names as aliases |
| `history` | `metrics.jsonl`: the rows, and what is known of them after a restart |
| `tensorboard` | TensorBoard's event files, made from the rows |
| `task` | the task of the store service that follows the log |
"""
