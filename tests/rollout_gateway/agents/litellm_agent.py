"""litellm: two turns of one conversation, each a tool call and a text, streamed."""

import json
import os
from typing import Any

import litellm
from move_tool import MOVE

bias = {"logit_bias": json.loads(os.environ["AGENT_LOGIT_BIAS"])}
messages: list[Any] = []
cells, text, count = [], "", 0


def say(choice: Any) -> Any:
    global text, count
    chunks = list(
        litellm.completion(
            model="openai/tictactoe",
            messages=messages,
            tools=[MOVE],
            tool_choice=choice,
            max_tokens=75,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=bias,
        )
    )
    count += len(chunks)
    message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    text += message.content or ""
    messages.append(message.model_dump(exclude_none=True))
    return message


for board in ("a1=x", "b2=o"):
    messages.append({"role": "user", "content": board})
    (call,) = say({"type": "function", "function": {"name": "move"}}).tool_calls
    cells.append(json.loads(call.function.arguments)["cell"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    say("none")
print(json.dumps({"cells": cells, "text": text, "chunks": count}))
