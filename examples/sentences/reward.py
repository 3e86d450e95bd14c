"""The reward of a sentence, as the judge's settings name it: `entry = "examples.sentences.reward:keeps_rules"`.

The judge runs the function in a sandboxed process for each run (docs/judging.md). It sees the run's messages alone."""

from __future__ import annotations

import re
from typing import Any

TASK = re.compile(r"Write (\d+) words\. Use: (\w+)\. Avoid the letter: (\w)\.")


def score(task: str, sentence: str) -> float:
    """Return the mean over four rules of how well each is kept, from 0 to 1: the number of words, the word to use, the
    share of words without the letter, and the share of words that are no repetition.

    Raises `ValueError` for a task of another form."""
    found = TASK.search(task)
    if found is None:
        raise ValueError(f"not a task of this example: {task!r}")
    length, wanted, letter = int(found[1]), found[2], found[3]
    words = re.findall(r"\w+", sentence.lower())
    if not words:
        return 0.0
    parts = (
        max(0.0, 1 - abs(len(words) - length) / length),
        float(wanted in words),
        sum(letter not in word for word in words) / len(words),
        float(len(set(words)) == len(words)),
    )
    return sum(parts) / len(parts)


def keeps_rules(trajectory: dict[str, Any]) -> float:
    """The reward of a run: `score` of its last reply for its first user message."""
    messages = trajectory["messages"]
    task = next(message["content"] for message in messages if message["role"] == "user")
    return score(task, messages[-1]["content"] or "")
