"""Makes the example's base model: a tiny Qwen3 that calls the tools in the right form and often in the wrong way.

    python -m examples.mcp_rl.make_model --out runs/models/mcp_rl [--seed N] [--steps N]

The teacher that it imitates guesses answers, asks for columns that it has not looked up, takes the wrong function or
leaves out a condition, each with the probability below. About a quarter of its answers are right. The parts of a SQL
query are one token each, so a query is six tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Qwen3ForCausalLM

from examples.mcp_rl.shop import CITIES, COLUMNS, ITEMS, QUESTIONS, SYSTEM, Scenario, scenario
from trainer import tiny

NUMBERS = tuple(map(str, range(100)))
CALLS = 4

# What the teacher does, and how probable it is.
LOOKS_UP, QUERIES = 0.4, 0.45
"""At first: looks up the columns, or writes a query at once; else it guesses the answer."""
RIGHT = {"function": 0.6, "column": 0.75, "item": 0.85, "city": 0.9, "answer": 0.85}
"""Takes the right one where it is known; else any."""
STAR, CITY, AGAIN = 0.8, 0.8, 0.1
"""Counts rows and not a column; names the city at all; asks again although it has a result."""


CHAT_TEMPLATE = tiny.CHAT_TEMPLATE.replace(
    "call.function | tojson",
    """'{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}'""",
)
"""The name comes first, as it is sampled. OpenAI's client sends the arguments first, and by `tojson` alone the reply
would render to other tokens in the next call's prompt."""


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def one_of(draw: random.Random, part: str, right: str, choices: Iterable[str]) -> str:
    return right if draw.random() < RIGHT[part] else draw.choice(list(choices))


def taught_sql(task: Scenario, column: str, draw: random.Random) -> str:
    """A query of the teacher's, who knows the column's name unless `column` is empty."""
    function = one_of(draw, "function", task.function, QUESTIONS)
    if function == "count" and draw.random() < STAR:
        column = "*"
    else:
        column = one_of(draw, "column", column, COLUMNS) if column else draw.choice(COLUMNS)
    item = one_of(draw, "item", task.item, ITEMS)
    sql = f"SELECT {function}({column}) FROM orders WHERE item = '{item}'"
    return f"{sql} AND city = '{one_of(draw, 'city', task.city, CITIES)}'" if draw.random() < CITY else sql


def taught_run(task: Scenario, draw: random.Random) -> list[dict[str, Any]]:
    """One run of the teacher as a chat."""
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.question}]
    column = result = ""
    for turn in range(CALLS):
        first = (1 - AGAIN, 0.0) if result else (0.08, 0.0) if column else (1 - LOOKS_UP - QUERIES, LOOKS_UP)
        share, (answers, looks_up) = draw.random(), first
        if share < answers or turn == CALLS - 1:
            text = one_of(draw, "answer", result, NUMBERS) if result else draw.choice(NUMBERS)
            return [*chat, {"role": "assistant", "content": text}]
        name = "schema" if share < answers + looks_up else "query"
        arguments = {} if name == "schema" else {"sql": taught_sql(task, column, draw)}
        said = task.call(name, arguments)
        chat += [call(name, arguments), {"role": "tool", "content": said}]
        if name == "schema":
            column = task.column
        elif not said.startswith("Error"):
            result = said
    return chat


def words() -> list[str | AddedToken]:
    """The words of the tokenizer: the question's, and the parts of each possible call."""
    alone = (*ITEMS, *CITIES, *COLUMNS, *NUMBERS, *QUESTIONS.values(), "for", "from")
    empty, query = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in (("schema", {}), ("query", {"sql": "SELECT "}))
    )
    begin, _, end = query.partition("SELECT ")
    return [
        *(tiny.word_token(word, single_word=True) for word in alone),
        SYSTEM,
        empty,
        *(f"{begin}SELECT {function}(" for function in QUESTIONS),
        *(f"{column}) FROM orders WHERE item = '" for column in (*COLUMNS, "*")),
        "' AND city = '",
        f"'{end}",
        "orders(item, city, ",
        "Error: no such column: ",
    ]


def main() -> None:
    args = tiny.arguments(__doc__, tiny.MODELS / "mcp_rl", steps=400)
    tokenizer = tiny.make_tokenizer(words())
    tokenizer.chat_template = CHAT_TEMPLATE

    def loss_of(model: Qwen3ForCausalLM, step: int) -> torch.Tensor:
        draw = random.Random(f"teacher/{args.seed}/{step}")
        chats = [taught_run(scenario(step * 64 + n, args.seed), draw) for n in range(64)]
        return tiny.reply_loss(model, tokenizer, chats)

    tiny.make(args, tokenizer, loss_of)


if __name__ == "__main__":
    main()
