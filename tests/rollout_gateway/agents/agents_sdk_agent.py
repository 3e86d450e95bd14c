"""The OpenAI Agents SDK: two turns of one conversation, each a tool call and a text, streamed.

Its own way is `/v1/responses`; with the argument `chat_completions` it uses that endpoint."""

import asyncio
import json
import os
import sys
from typing import Any, Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

cells: list[str] = []


@function_tool
def move(cell: Literal["a1", "b2"]) -> str:
    """Play a cell."""
    cells.append(cell)
    return "ok"


async def main() -> None:
    set_tracing_disabled(True)
    if sys.argv[1:] == ["chat_completions"]:
        set_default_openai_api("chat_completions")
    agent = Agent(
        name="player",
        model="tictactoe",
        tools=[move],
        model_settings=ModelSettings(
            tool_choice="move",  # the SDK itself goes back to "auto" once a tool was used
            max_tokens=75,
            include_usage=True,
            extra_body={"logit_bias": json.loads(os.environ["AGENT_LOGIT_BIAS"]), "seed": 1},
        ),
    )
    history: list[Any] = []
    text, events = "", 0
    for board in ("a1=x", "b2=o"):
        history.append({"role": "user", "content": board})
        result = Runner.run_streamed(agent, history)
        async for event in result.stream_events():
            events += event.type == "raw_response_event"
        text += str(result.final_output)
        history = result.to_input_list()
    print(json.dumps({"cells": cells, "text": text, "chunks": events}))


asyncio.run(main())
