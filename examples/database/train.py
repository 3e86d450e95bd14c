"""Trains an agent that answers questions about a SQLite database with tools; RULER judges its attempts.

    python -m examples.database.train --seed 0 --run-dir runs/database-0

Starts the whole installation with a stand-in for a judge model, runs groups of attempts while the trainer learns from
the judge's scores, and then compares the base model and the last version on held-out questions by the right answers."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

import anyio
import openai
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam

from examples.common import curve, running, stand_in
from examples.database.shop import SYSTEM, TOOLS, Scenario, scenario
from examples.database.stand_in import score
from journeywork import AsyncJourneywork, Trajectory

MODEL = "database"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
JUDGE: dict[str, Any] = {}  # the stand-in; a judge model: JUDGE = {"judge.model": "openai/gpt-5-mini"}
GROUP_SIZE = 8
GROUPS_PER_STEP = 8
CONCURRENCY = 32
MAX_CALLS = 4
"""Model calls in one run."""
SETTINGS = {
    "judge.group_size": GROUP_SIZE,
    "trainer.groups_per_step": GROUPS_PER_STEP,
    "gateway.max_groups_ahead": 3 * GROUPS_PER_STEP,
}

CLIENT = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=8, timeout=120)
"""One pool of connections for all agents."""


async def answer(run: Trajectory, task: Scenario) -> float:
    """Answer one question, with as many calls of tools as the model likes. Returns 1 for the right answer, else 0."""
    agent = CLIENT.with_options(base_url=run.base_url, api_key=run.api_key)
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


async def learn(client: AsyncJourneywork, args: argparse.Namespace) -> None:
    """Run groups of attempts until the last step is served; judge and trainer work beside."""
    number = 0
    while await running.served_step(client, MODEL) < args.steps:
        tasks = [scenario("train", number + n, args.seed) for n in range(GROUPS_PER_STEP)]
        await client.gather(MODEL, tasks, attempt, group_size=GROUP_SIZE, concurrency=CONCURRENCY)
        number += GROUPS_PER_STEP


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=30, held_out=200, base=BASE)
    with contextlib.ExitStack() as stack:
        judge = JUDGE or {
            "judge.model": "openai/stand-in",
            "judge.api_base": stack.enter_context(stand_in.serving(score)),
        }
        async with running.installation(args, SETTINGS | judge) as client:
            await learn(client, args)
            held_out = [scenario("val", n) for n in range(args.held_out)]
            last = f"{MODEL}@{args.steps}"
            compared = await client.compare(f"{MODEL}@0", last, held_out, answer, concurrency=CONCURRENCY)
    curve.report(args, compared, metric="right")


if __name__ == "__main__":
    anyio.run(main)
