"""OpenAI's Python client: two turns of one conversation, each a tool call and a text, streamed."""

import json
import os
from typing import Any

from move_tool import MOVE
from openai import OpenAI

client = OpenAI()
bias = json.loads(os.environ["AGENT_LOGIT_BIAS"])
messages: list[Any] = []
cells, text, chunks = [], "", 0


def say(choice: Any) -> Any:
    global text, chunks
    with client.chat.completions.stream(
        model="tictactoe",
        messages=messages,
        tools=[MOVE],
        tool_choice=choice,
        max_completion_tokens=75,
        logit_bias=bias,
        seed=1,
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            chunks += event.type == "chunk"
            text += event.delta if event.type == "content.delta" else ""
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    return message


for board in ("a1=x", "b2=o"):
    messages.append({"role": "user", "content": board})
    (call,) = say({"type": "function", "function": {"name": "move"}}).tool_calls
    cells.append(call.function.parsed_arguments["cell"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    say("none")
print(json.dumps({"cells": cells, "text": text, "chunks": chunks}))
