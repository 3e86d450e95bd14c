"""The MCP example: questions and tools, its tokenizer, and the stand-in for a judge model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from examples.common import stand_in
from examples.mcp_rl.make_model import CHAT_TEMPLATE, call, taught_run, words
from examples.mcp_rl.shop import SYSTEM, Scenario, scenario
from examples.mcp_rl.stand_in import score
from judge.ruler.prompt import Prompt, build_prompt
from judge.ruler.rubrics import load_rubric
from tests.judge.kit import single
from trainer import tiny

TASK = Scenario("sum", "tea", "Oslo", "price", (("tea", "Oslo", 3), ("tea", "Oslo", 4), ("tea", "Lima", 9)))
RIGHT = "SELECT sum(price) FROM orders WHERE item = 'tea' AND city = 'Oslo'"


def sql_of(task: Scenario) -> str:
    return f"SELECT {task.function}({task.column}) FROM orders WHERE item = '{task.item}' AND city = '{task.city}'"


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SELECT sum(cost) FROM orders", "no such column: cost"),
        ("DELETE FROM orders", "not authorized"),
        ("ATTACH '/tmp/other' AS other", "not authorized"),
        ("PRAGMA database_list", "not authorized"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELECT count(*) FROM " + ", ".join(f"orders t{n}" for n in range(12)), "interrupted"),
        ("SELECT 1; SELECT 2", "one statement"),
    ],
)
def test_a_query_that_is_wrong_or_may_not_be_is_an_error_that_the_agent_reads(sql: str, error: str) -> None:
    said = TASK.call("query", {"sql": sql})
    assert said.startswith("Error: ")
    assert error in said


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.make_tokenizer(words())
    made.chat_template = CHAT_TEMPLATE
    return made


def test_each_call_continues_the_tokens_of_the_one_before(tokenizer: Any) -> None:
    """Else a run would be as many sequences as calls. The client sends back what it parsed, in an order of its own."""
    draw, calls = random.Random(0), 0
    for number in range(50):
        before: list[int] = []
        chat: list[dict[str, Any]] = []
        for message in taught_run(scenario(number, 0), draw):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                assert prompt[: len(before)] == before
                sampled = tokenizer.apply_chat_template([*chat, message], return_dict=False)[len(prompt) :]
                before, calls = prompt + sampled, calls + 1
                assert len(sampled) in (2, 7, 5)  # a look at the schema or an answer; a query with or without city
                if tool_calls := message.get("tool_calls"):
                    ids = [
                        {
                            **one,
                            "id": "x",
                            "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])},
                        }
                        for one in tool_calls
                    ]
                    said = ChatCompletionMessage(role="assistant", tool_calls=ids).model_dump(exclude_none=True)
                    (function,) = (one["function"] for one in said["tool_calls"])
                    assert list(function) == ["arguments", "name"]
                    # vLLM gives the template the arguments as an object.
                    function["arguments"] = json.loads(function["arguments"])
                    message = said
            chat.append(message)
    assert calls > 120


def attempt(*said: tuple[str, str] | str) -> list[dict[str, Any]]:
    """An attempt at `TASK`: queries with their results, looks at the schema (an empty query), and an answer."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK.question}]
    for turn in said:
        if isinstance(turn, str):
            chat.append({"role": "assistant", "content": turn})
            continue
        sql, result = turn
        message = call("query", {"sql": sql}) if sql else call("schema", {})
        for one in message["tool_calls"]:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        chat += [message, {"role": "tool", "content": result}]
    return chat


LOOK = ("", "orders(item, city, price)")
ATTEMPTS = {
    "good": attempt(LOOK, (RIGHT, "7"), "7"),
    "long": attempt(LOOK, ("SELECT sum(cost) FROM orders", "Error: no such column: cost"), (RIGHT, "7"), "7"),
    "misread": attempt(LOOK, (RIGHT, "7"), "12"),
    "wrong city": attempt(LOOK, (RIGHT.replace("Oslo", "Lima"), "9"), "9"),
    "guess": attempt("7"),
    "no answer": attempt(LOOK, LOOK, LOOK, LOOK),
    "only an error": attempt(LOOK, ("SELECT sum(cost) FROM orders", "Error: no such column: cost"), "7"),
}
WORTH = {"good": 1.0, "long": 0.95, "misread": 0.45, "wrong city": 0.45, "guess": 0, "no answer": 0, "only an error": 0}


def ruler_prompt(names: Sequence[str]) -> Prompt:
    """RULER's prompt about these attempts."""
    transcripts = [single(name, tuple(ATTEMPTS[name]), ()) for name in names]
    return build_prompt(transcripts, load_rubric(), random.Random(0), 100_000)


@pytest.mark.parametrize("names", [[*ATTEMPTS], [*reversed(ATTEMPTS)], ["good", "long"], ["misread", "good"]])
def test_the_stand_in_scores_attempts_as_ruler_shows_them(names: list[str]) -> None:
    """The attempts that all begin with the same calls are shown without them."""
    prompt = ruler_prompt(names)
    with stand_in.serving(score) as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model="stand-in", messages=prompt.messages)  # type: ignore[arg-type]
        scores = json.loads(reply.choices[0].message.content or "")["scores"]
        assert {prompt.names[s["id"]]: s[prompt.score_key] for s in scores} == pytest.approx(
            {name: WORTH[name] for name in names}
        )


def test_the_stand_in_refuses_a_prompt_about_something_else() -> None:
    with (
        stand_in.serving(score) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="no attempts at a task"),
    ):
        client.chat.completions.create(model="stand-in", messages=[{"role": "user", "content": "Who won?"}])
