"""Anthropic's client: two turns of one conversation, each a tool call and a text, streamed."""

import json
import os
from typing import Any

import anthropic
from move_tool import MOVE

client = anthropic.Anthropic()
extra = {"logit_bias": json.loads(os.environ["AGENT_LOGIT_BIAS"]), "seed": 1}
move: Any = {"name": "move", "strict": True, "input_schema": MOVE["function"]["parameters"]}
messages: list[Any] = []
cells, text, chunks = [], "", 0


def say(choice: Any) -> Any:
    global text, chunks
    with client.messages.stream(
        model="tictactoe", messages=messages, tools=[move], tool_choice=choice, max_tokens=75, extra_body=extra
    ) as stream:
        for event in stream:
            chunks += 1
            text += event.text if event.type == "text" else ""
        message = stream.get_final_message()
    messages.append(
        {
            "role": "assistant",
            "content": [b.model_dump(include={"type", "text", "id", "name", "input"}) for b in message.content],
        }
    )
    return message.content


for board in ("a1=x", "b2=o"):
    messages.append({"role": "user", "content": board})
    (use,) = [b for b in say({"type": "tool", "name": "move"}) if b.type == "tool_use"]
    cells.append(use.input["cell"])
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "ok"}]})
    say({"type": "none"})
print(json.dumps({"cells": cells, "text": text, "chunks": chunks}))
