"""What the stand-in for a judge model says of an attempt (`examples.common.stand_in`).

It reads the question, the queries, their results and the answer. It knows neither the database nor the right answer.
"""

from __future__ import annotations

import itertools
import re

from examples.mcp_rl.shop import QUESTIONS

_QUESTION = re.compile(rf"({'|'.join(QUESTIONS.values())}) for (\w+) from (\w+)\?")
_TURN = re.compile(r"^\[(assistant|tool)\] (.*?)(?=^\[(?:assistant|tool)\] |\Z)", re.M | re.S)
_QUERY = re.compile(r"\(calls query\) (.*)", re.S)


def score(context: str, attempt: str) -> float:
    """What one attempt is worth, from 0 to 1. `context`: the question, and the first calls that all attempts share.

    Each right part of the last query that worked earns something, and so does an answer that repeats its result; most
    is for all of them together. Every call beyond those that are needed costs a little."""
    question = _QUESTION.search(context)
    if question is None:
        raise ValueError("the prompt holds no question about the shop")
    asked, item, city = question.groups()
    function = next(name for name, text in QUESTIONS.items() if text == asked)
    turns = _TURN.findall(context + attempt)
    sql = result = ""
    for (_, call), (role, output) in itertools.pairwise(turns):
        query = _QUERY.match(call)
        if query and role == "tool" and not output.startswith("Error"):
            sql, result = query.group(1), output.strip()
    if not sql:
        return 0.0
    parts = [f"{function}(" in sql, f"'{item}'" in sql, f"'{city}'" in sql]
    numbers = re.findall(r"-?\d+", turns[-1][1]) if turns[-1][0] == "assistant" else []
    repeats = numbers[-1:] == [result]
    calls = sum(role == "tool" for role, _ in turns)
    wasted = max(calls - (1 if function == "count" else 2), 0)
    worth = 0.15 * sum(parts) + 0.15 * repeats + 0.4 * (all(parts) and repeats) - 0.05 * wasted
    return round(max(worth, 0.0), 3)
