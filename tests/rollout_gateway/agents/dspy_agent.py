"""dspy: a signature that is asked for twice, the second time with the history of the first, in its own text format.

The regular expression is what a model that does not know the format needs to get through."""

import json
import os
from typing import Literal

import dspy


class Play(dspy.Signature):
    """Play a cell."""

    board: str = dspy.InputField()
    history: dspy.History = dspy.InputField()
    cell: Literal["a1", "b2"] = dspy.OutputField()


lm = dspy.LM(
    "openai/tictactoe",
    api_base=os.environ["OPENAI_BASE_URL"],
    cache=False,
    max_tokens=75,
    logit_bias=json.loads(os.environ["AGENT_LOGIT_BIAS"]),
    extra_body={"structured_outputs": {"regex": r"\[\[ ## cell ## \]\]\n(a1|b2)\n\n\[\[ ## completed ## \]\]"}},
)
dspy.configure(lm=lm)
play = dspy.Predict(Play)
cells: list[str] = []
turns: list[dict[str, str]] = []
for board in ("a1=x", "b2=o"):
    cell = play(board=board, history=dspy.History(messages=turns)).cell
    cells.append(cell)
    turns.append({"board": board, "cell": cell})
print(json.dumps({"cells": cells}))
