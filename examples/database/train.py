"""Trains an agent that answers questions about a SQLite database with tools; RULER judges its attempts.

    python -m examples.database.train --seed 0 --run-dir runs/database-0

Starts the whole installation with a stand-in for a judge model, runs groups of attempts while the trainer learns from
the judge's scores, and then compares the base model and the last version on held-out questions by the right answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam

from examples.common import curve, running, stand_in
from examples.database.shop import SYSTEM, TOOLS, Scenario, scenario
from examples.database.stand_in import score
from journeywork import Trajectory

MODEL = "database"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
JUDGE: dict[str, Any] = {}  # the stand-in; a judge model: JUDGE = {"judge.model": "openai/gpt-5-mini"}
MAX_CALLS = 4
"""Model calls in one run."""


async def answer(run: Trajectory, task: Scenario) -> float:
    """Answer one question, with as many calls of tools as the model likes. Returns 1 for the right answer, else 0."""
    agent = running.agent(run)
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.question},
    ]
    right = False
    for _ in range(MAX_CALLS):
        reply = await agent.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=100, temperature=1.0
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
        if not message.tool_calls:
            right = task.is_right(message.content or "")
            break
        for call in message.tool_calls:
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            result = use(task, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    run.metrics = {"right": float(right), "messages": len(messages)}
    return float(right)


def use(task: Scenario, name: str, arguments: str) -> str:
    """Run a tool with the arguments that the model wrote as JSON."""
    try:
        return task.call(name, json.loads(arguments))
    except ValueError as error:
        return f"Error: {error}"


async def attempt(run: Trajectory, task: Scenario) -> None:
    """One training run. It has no reward: that is left to the judge."""
    await answer(run, task)


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=30, held_out=200, base=BASE)
    with stand_in.judge_settings(JUDGE, score) as settings:
        async with running.installation(args, settings) as client:
            compared = await running.train_and_compare(
                client,
                args,
                lambda n: scenario("train", n, args.seed),
                attempt,
                lambda n: scenario("val", n),
                answer,
            )
    curve.report(args, compared, metric="right")


if __name__ == "__main__":
    anyio.run(main)
