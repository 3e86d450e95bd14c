"""pydantic-ai: two runs of one conversation, each a tool call and a text, streamed."""

import asyncio
import json
import os
from typing import Any, Literal

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings

cells: list[str] = []
bias = json.loads(os.environ["AGENT_LOGIT_BIAS"])


def settings(run: RunContext[None]) -> OpenAIChatModelSettings:
    first = run.run_step == 1
    return OpenAIChatModelSettings(
        max_tokens=75, seed=1, openai_logit_bias=bias, tool_choice=["move"] if first else "none"
    )


agent = Agent(OpenAIChatModel("tictactoe"), model_settings=settings)


@agent.tool_plain(strict=True)
def move(cell: Literal["a1", "b2"]) -> str:
    """Play a cell."""
    cells.append(cell)
    return "ok"


async def main() -> None:
    history: Any = None
    text, chunks = "", 0
    for board in ("a1=x", "b2=o"):
        async with agent.run_stream(board, message_history=history) as result:
            async for piece in result.stream_text(delta=True, debounce_by=None):
                text += piece
                chunks += 1
            history = result.all_messages()
    print(json.dumps({"cells": cells, "text": text, "chunks": chunks}))


asyncio.run(main())
