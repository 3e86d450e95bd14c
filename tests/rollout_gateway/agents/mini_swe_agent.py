"""mini-swe-agent: its default agent, which runs what the model writes in a shell, until its step limit.

The regular expression keeps a model that can't write commands to two harmless ones."""

import json
import os
import re

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

model = LitellmTextbasedModel(
    model_name="openai/tictactoe",
    cost_tracking="ignore_errors",
    model_kwargs={
        "max_tokens": 75,
        "logit_bias": json.loads(os.environ["AGENT_LOGIT_BIAS"]),
        "extra_body": {"structured_outputs": {"regex": r"THOUGHT: a\n\n```mswea_bash_command\necho (a1|b2)\n```"}},
    },
)
agent = DefaultAgent(model, LocalEnvironment(), system_template="Play.", instance_template="{{task}}", step_limit=2)
done = agent.run("a1=x")
assert done["exit_status"] == "LimitsExceeded", done
observed = [re.findall("<output>\n(.*)", str(m["content"])) for m in agent.messages if m["role"] == "user"]
cells = [cell for found in observed for cell in found]
print(json.dumps({"cells": cells}))
