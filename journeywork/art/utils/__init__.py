"""Helpers for rollouts and training loops.

| module | contents |
| --- | --- |
| `helpers` | `retry` repeats a function that failed, `iterate_dataset` divides a data set over several epochs |
| `sft` | the chunks of a data set for supervised fine-tuning |
| `litellm` | choices of litellm as those of OpenAI's client |
| `logging` | lines on the terminal |
"""

from typing import TYPE_CHECKING

from journeywork.art.errors import no_attribute
from journeywork.art.utils.helpers import iterate_dataset, retry

if not TYPE_CHECKING:  # it would hide misspelt names from type checkers
    __getattr__ = no_attribute(__name__)

__all__ = ["iterate_dataset", "retry"]
