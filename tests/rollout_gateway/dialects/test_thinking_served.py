"""A thinking model's own turns through the gateway: prompts on the log are those that a chat completion with
`reasoning_content` gets, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pipeline.log.broker import Broker
from tests.conftest import DOUBLE, VllmServer
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.dialects.kit import claude
from tests.rollout_gateway.kit import exchanges, key_config

pytestmark = [pytest.mark.anyio, pytest.mark.inference]

STEPS = 10


@pytest.fixture
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM with a chat template that shows the model its reasoning."""
    if DOUBLE:
        pytest.skip("the double has one chat template")
    folder = tmp_path_factory.mktemp("thinking")
    template = (VllmServer.base / "chat_template.jinja").read_text()
    shown = "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '')"
    opening = "'<|' + message.role + '|>' + "
    assert opening in template
    (folder / "template.jinja").write_text(template.replace(opening, f"{opening}{shown} + "))
    server = VllmServer(
        folder, args=("--chat-template", str(folder / "template.jinja"), "--max-model-len", "1024")
    )
    server.start()
    yield server
    server.stop()


def reasoning(step: int) -> str:
    return f"b{step % 3 + 1}={step}"


@pytest.mark.vllm
async def test_prompts_of_ten_tool_steps_are_those_of_chat(
    start_gateway: StartGateway, thinking_server: VllmServer, broker: Broker
) -> None:
    gateway = start_gateway(urls=(thinking_server.url,))
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

    def opened(name: str, key: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "tictactoe", "id": name}
        return dict(httpx.post(f"{gateway.url}/v1/trajectories", json=body, headers=headers).json())

    client = gateway.agent(opened("kept", "alice"), max_retries=0)
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
    others = gateway.agent(opened("other", "alice"), max_retries=0), gateway.client(api_key="bob")
    for other in others:
        for options in ({"previous_response_id": first.id, "input": "b1"}, {"input": [reference]}):
            with pytest.raises(openai.BadRequestError) as refused:
                other.responses.create(**asked, **options)
            assert refused.value.code == "previous_response_not_found"
