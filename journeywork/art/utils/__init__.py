"""Helpers for rollouts and training loops.

| module | contents |
| --- | --- |
| `retry` | repeat a function that failed |
| `iterate_dataset` | batches of a data set over several epochs |
| `limit_concurrency` | limit how many calls run at the same time |
| `sft` | supervised fine-tuning on a file |
| `format_message` | a message as text |
| `log_http_errors` | logs the body of a refused request |
| `get_model_step` | the newest step of a model in a folder |
| `strip_logprobs`, `output_dirs`, `logging` | smaller logs; where a model's files are; lines on the terminal |
| `benchmarking`, `get_repo_root_path` | logged trajectories as a table; the program's repository |
| `litellm` | choices of litellm as those of OpenAI's client |
"""

from typing import TYPE_CHECKING

from journeywork.art.refused import refused_parts
from journeywork.art.utils.format_message import format_message
from journeywork.art.utils.get_model_step import get_model_step
from journeywork.art.utils.iterate_dataset import DatasetBatch, iterate_dataset
from journeywork.art.utils.limit_concurrency import limit_concurrency
from journeywork.art.utils.log_http_errors import log_http_errors
from journeywork.art.utils.retry import retry

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = refused_parts(__name__)

__all__ = [
    "DatasetBatch",
    "format_message",
    "get_model_step",
    "iterate_dataset",
    "limit_concurrency",
    "log_http_errors",
    "retry",
]
