"""Other clients than OpenAI's and Anthropic's own: a tool-using, streamed, multi-turn agent each, tokens exact."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline.broker import Broker
from pipeline.config import NatsConfig
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.test_chat import exchanges

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

LITELLM_AGENT = """
import json, sys
import litellm

tool = {"type": "function", "function": {"name": "move", "strict": True, "parameters": {"type": "object",
    "properties": {"cell": {"type": "string", "enum": ["a1", "b2"]}}, "required": ["cell"], "additionalProperties": False}}}
messages = [{"role": "user", "content": "a1=x"}]
tokens = []
for turn in range(2):
    chunks = list(litellm.completion(
        model="openai/tictactoe", api_base=sys.argv[1], api_key=sys.argv[2], messages=messages, tools=[tool],
        tool_choice={"type": "function", "function": {"name": "move"}}, max_tokens=120, stream=True,
        stream_options={"include_usage": True}, extra_body={"logit_bias": {str(t): -100 for t in (197, 198, 201, 220)}},
    ))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["cell"] in ("a1", "b2")
    messages += [whole.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    tokens.append(whole.usage.completion_tokens)
print(json.dumps(tokens))
"""


async def test_litellm(gateway: GatewayProcess, nats_config: NatsConfig) -> None:
    """In a process of its own: importing it is slow and brings warnings that are not ours."""
    opened = gateway.open(id="lite")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LITELLM_AGENT, opened["base_url"], opened["api_key"]],
        capture_output=True, text=True, timeout=300, env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip().splitlines()[-1]  # litellm talks on standard output too
    async with Broker.connect(nats_config) as broker:
        events = await exchanges(broker, "lite")
    assert [len(e.sampled_ids) // 4 for e in events] == [int(n) for n in said.strip("[]").split(",")]
    assert all(len(e.sampled_ids) == len(e.logprobs) for e in events)
