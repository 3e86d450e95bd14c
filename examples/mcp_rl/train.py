"""Trains a model to use the tools of an MCP server, without data and without a reward.

    python -m examples.mcp_rl.train --run-dir runs/mcp_rl

A model reads the server's tools and writes scenarios for them, the policy plays each of them several times, RULER
compares the runs, and the trainer learns from the scores. At the end the judge compares the base model and the last
version on held-out scenarios. With an OPENAI_API_KEY the model that writes and judges is $HELPER_MODEL; without one, a
stand-in for it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

import journeywork.art as art
from examples.common import judged, running
from examples.mcp_rl.server import TASKS
from examples.mcp_rl.shop import SYSTEM
from examples.mcp_rl.stand_in import score
from journeywork.art.mcp import MCPTool, generate_scenarios

SERVER = [sys.executable, "-m", "examples.mcp_rl.server"]
"""The command of the server."""
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
MAX_CALLS = 4
"""Model calls in a run."""
LEARNING_RATE = 6e-3
"""For the tiny model; 1e-5 suits billions of parameters."""


@contextlib.asynccontextmanager
async def connect(command: list[str]) -> AsyncIterator[tuple[ClientSession, list[MCPTool]]]:
    """Start an MCP server in the repository's folder, and yield a session with it, and its tools."""
    started = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ), cwd=running.ROOT)
    # A notebook's own sys.stderr is no file, which the server's process needs.
    async with stdio_client(started, errlog=sys.__stderr__) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        listed = (await session.list_tools()).tools
        yield session, [MCPTool(tool.name, tool.description or "", tool.input_schema) for tool in listed]


async def use(session: ClientSession, name: str, arguments: str) -> str:
    """Call a tool with the arguments that the model wrote as JSON."""
    try:
        result = await session.call_tool(name, json.loads(arguments))
    except (ValueError, MCPError) as error:
        return f"Error: {error}"
    return "".join(part.text for part in result.content if part.type == "text")


async def play(
    model: art.TrainableModel[Any], session: ClientSession, tools: list[MCPTool], scenario: str, version: str
) -> art.Trajectory:
    """Let a version do a scenario, with as many calls of tools as it likes. The reward is left to the judge."""
    offered: Any = [tool.to_tool_schema() for tool in tools]
    run = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": scenario}],
        tools=offered,
    )
    for _ in range(MAX_CALLS):
        reply = await model.openai_client().chat.completions.create(
            model=version, messages=run.messages(), tools=offered, max_tokens=100, temperature=1.0
        )
        run.messages_and_choices.append(reply.choices[0])
        calls: Any = reply.choices[0].message.tool_calls
        if not calls:
            break
        for call in calls:
            said = await use(session, call.function.name, call.function.arguments)
            run.messages_and_choices.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return run


async def main() -> None:
    args = running.arguments(__doc__, "mcp_rl", steps=12, held_out=8, base=BASE)
    async with (
        connect(SERVER) as (session, tools),
        judged.installation(args, "mcp_rl", score, TASKS) as (model, helper),
    ):
        written = await generate_scenarios(
            tools,
            num_scenarios=len(TASKS),
            generator_model=helper.model,
            generator_api_key=helper.key,
            generator_base_url=helper.url,
        )
        scenarios = [scenario.task for scenario in written.shuffle()]
        rollout = partial(play, model, session, tools)
        await judged.train_and_compare(args, model, scenarios, rollout, helper, LEARNING_RATE)


if __name__ == "__main__":
    anyio.run(main)
