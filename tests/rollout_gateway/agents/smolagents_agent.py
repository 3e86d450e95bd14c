"""smolagents: a `CodeAgent` that writes a call as Python code, over two runs of one conversation, streamed.

The regular expression is what a model that can't write Python needs to get through."""

import json
import os

from smolagents import CodeAgent, OpenAIModel, tool
from smolagents.monitoring import LogLevel

cells: list[str] = []


@tool
def move(cell: str) -> str:
    """Play a cell.

    Args:
        cell: Its name.
    """
    cells.append(cell)
    return "ok"


model = OpenAIModel(
    "tictactoe",
    max_tokens=75,
    logit_bias=json.loads(os.environ["AGENT_LOGIT_BIAS"]),
    extra_body={"structured_outputs": {"regex": r'<code>\nprint\(move\("(a1|b2)"\)\)\n'}},
)
agent = CodeAgent(tools=[move], model=model, max_steps=1, stream_outputs=True, verbosity_level=LogLevel.OFF)
chunks = 0
for number, board in enumerate(("a1=x", "b2=o")):
    chunks += sum(1 for _ in agent.run(board, stream=True, reset=number == 0))
print(json.dumps({"cells": cells, "chunks": chunks}))
