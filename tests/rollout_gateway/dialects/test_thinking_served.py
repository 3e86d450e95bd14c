"""A thinking model's own turns through the gateway: prompts on the log are those that a chat completion with
`reasoning_content` gets, token for token."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.conftest import LONG, StartGateway
from tests.rollout_gateway.dialects.kit import claude
from tests.rollout_gateway.kit import exchanges, key_config

pytestmark = [pytest.mark.anyio, pytest.mark.inference]

STEPS = 4


def reasoning(step: int) -> str:
    return f"b{step % 3 + 1}={step}"


@LONG
@pytest.mark.vllm
async def test_prompts_of_tool_steps_are_those_of_chat(
    start_gateway_alone: StartGateway, long_vllm: VllmServer, broker: Broker
) -> None:
    gateway = start_gateway_alone(urls=(long_vllm.url,))
    chat: list[Any] = [{"role": "user", "content": "a1=."}]
    messages: list[Any] = list(chat)
    items: list[Any] = list(chat)
    apis = ("chat", "messages", "responses")
    for step in range(STEPS):
        call, thought = f"call_{step}", reasoning(step)
        function = {"name": "move", "arguments": '{"cell":"a1"}'}
        chat = [
            *chat,
            {"role": "assistant", "content": None, "reasoning_content": thought,
             "tool_calls": [{"id": call, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call, "content": "ok"},
        ]  # fmt: skip
        messages = [
            *messages,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": thought, "signature": ""},
                {"type": "tool_use", "id": call, "name": "move", "input": {"cell": "a1"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "ok"}]},
        ]  # fmt: skip
        items = [
            *items,
            {"type": "reasoning", "id": f"rs_{step}", "summary": [{"type": "summary_text", "text": thought}]},
            {"type": "function_call", "call_id": call, "name": "move", "arguments": '{"cell":"a1"}'},
            {"type": "function_call_output", "call_id": call, "output": "ok"},
        ]
        agents = {name: gateway.open(id=f"{name}-{step}") for name in apis}
        gateway.agent(agents["chat"]).chat.completions.create(model="tictactoe", messages=chat, max_tokens=2)
        claude(gateway, agents["messages"]).messages.create(
            model="tictactoe", messages=messages, max_tokens=2
        )
        gateway.agent(agents["responses"]).responses.create(
            model="tictactoe", input=items, max_output_tokens=2
        )
    for step in range(STEPS):
        prompts = {name: (await exchanges(broker, f"{name}-{step}"))[0].prompt_ids for name in apis}
        assert prompts["messages"] == prompts["responses"] == prompts["chat"], step


async def test_answers_are_referred_to_by_id(start_gateway: StartGateway, broker: Broker) -> None:
    """As clients do that leave the conversation with the server: by `previous_response_id`, or by `item_reference`. A
    trajectory's key knows its own answers, an agent's key those of its runs."""
    gateway = start_gateway(keys=(key_config("alice"), key_config("bob")))
    alice = Caller(gateway, "alice")
    client = gateway.agent(alice.open(id="kept"), max_retries=0)
    asked: Any = {"model": "tictactoe", "instructions": "Play.", "max_output_tokens": 6}
    question: Any = {"role": "user", "content": "a1=."}
    first = client.responses.create(**asked, input=[question])
    assert first.model_dump()["store"] is True
    (item,) = first.output
    client.responses.create(**asked, input=[question, item.model_dump(), {"role": "user", "content": "b1"}])
    client.responses.create(**asked, input="b1", previous_response_id=first.id)
    reference: Any = {"type": "item_reference", "id": item.id}
    client.responses.create(**asked, input=[question, reference, {"role": "user", "content": "b1"}])
    _, whole, previous, by_item = await exchanges(broker, "kept")
    assert whole.prompt_ids == previous.prompt_ids == by_item.prompt_ids
    gateway.client(api_key="alice").responses.create(**asked, input="b1", previous_response_id=first.id)
    others = gateway.agent(alice.open(id="other"), max_retries=0), gateway.client(api_key="bob")
    for other in others:
        for options in ({"previous_response_id": first.id, "input": "b1"}, {"input": [reference]}):
            with pytest.raises(openai.BadRequestError) as refused:
                other.responses.create(**asked, **options)
            assert refused.value.code == "previous_response_not_found"
