"""Helpers for rollouts and training loops.

| module | contents |
| --- | --- |
| `retry` | repeat a function that failed |
| `iterate_dataset` | batches of a data set over several epochs |
| `limit_concurrency` | limit how many calls run at the same time |
| `sft` | raises errors that say how a model is fine-tuned |
| `litellm` | choices of litellm as those of OpenAI's client |
"""

from journeyman.art.utils.iterate_dataset import DatasetBatch, iterate_dataset
from journeyman.art.utils.limit_concurrency import limit_concurrency
from journeyman.art.utils.retry import retry

__all__ = ["DatasetBatch", "iterate_dataset", "limit_concurrency", "retry"]
