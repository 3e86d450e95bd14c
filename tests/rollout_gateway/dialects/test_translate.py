"""`/v1/messages` and `/v1/responses` with the official clients: their answers, and exact tokens on the log."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.dialects.kit import MESSAGE_TOOL, NO_SPACE, RESPONSE_TOOL, claude
from tests.rollout_gateway.kit import exchanges

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]


async def test_an_anthropic_agent_with_a_tool(gateway: GatewayProcess, broker: Broker) -> None:
    client = claude(gateway, gateway.open(id="claude"))
    asked: Any = {
        "model": "tictactoe", "max_tokens": 150, "extra_body": NO_SPACE, "system": "Play.", "tools": [MESSAGE_TOOL],
        "tool_choice": {"type": "tool", "name": "move"},
    }  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a1=."}]}]
    first = client.messages.create(**asked, messages=messages)
    (use,) = first.content
    assert use.type == "tool_use"
    assert use.name == "move"
    assert use.input["cell"] in ("a1", "b2")
    assert (first.stop_reason, first.model) == ("tool_use", "tictactoe@0")
    messages += [
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "ok"}]},
    ]
    with client.messages.stream(**asked, messages=messages) as stream:
        second = stream.get_final_message()
    assert second.content[0].type == "tool_use"
    assert second.content[0].input["cell"] in ("a1", "b2")
    asked = {"model": "tictactoe", "max_tokens": 6}
    with client.messages.stream(**asked, messages=[{"role": "user", "content": "b1=x"}]) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert last.stop_reason in ("max_tokens", "end_turn")
    assert last.usage.output_tokens > 0
    assert "".join(b.text for b in last.content if b.type == "text") == text
    events = await exchanges(broker, "claude")
    assert [e.endpoint for e in events] == ["/v1/messages"] * 3
    assert [m["role"] for m in json.loads(events[1].request)["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert len(events[0].sampled_ids) == 4 * first.usage.output_tokens == len(events[0].logprobs)
    assert len(events[2].sampled_ids) == 4 * last.usage.output_tokens
    assert len(events[0].prompt_ids) == 4 * first.usage.input_tokens


async def test_anthropic_errors_read_as_theirs(gateway: GatewayProcess) -> None:
    client = claude(gateway, gateway.open())
    ask: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.NotFoundError, match="nope") as refused:
        client.messages.create(model="nope", **ask)
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_model_len"):
        client.messages.create(model="tictactoe", **{**ask, "max_tokens": 9999})
    video: Any = [{"role": "user", "content": [{"type": "video"}]}]
    with pytest.raises(anthropic.BadRequestError, match="video"):
        client.messages.create(model="tictactoe", max_tokens=5, messages=video)


async def test_a_responses_agent_with_a_tool(gateway: GatewayProcess, broker: Broker) -> None:
    client = gateway.agent(gateway.open(id="codex"), max_retries=0)
    asked: Any = {
        "model": "tictactoe", "max_output_tokens": 150, "extra_body": NO_SPACE, "instructions": "Play.",
        "tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "move"},
    }  # fmt: skip
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "a1=."}]}]
    first = client.responses.create(**asked, input=history)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["cell"] in ("a1", "b2")
    assert (first.status, first.model) == ("completed", "tictactoe@0")
    history += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}]
    with client.responses.stream(**asked, input=history) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.function_call_arguments.delta" in kinds
    assert second.output[0].type == "function_call"
    third = client.responses.create(model="tictactoe", input="b1=x", max_output_tokens=6, stream=True)
    text, final = "", None
    for event in third:
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert final is not None
    assert final.output_text == text
    assert final.usage is not None
    events = await exchanges(broker, "codex")
    assert [e.endpoint for e in events] == ["/v1/responses"] * 3
    assert [m["role"] for m in json.loads(events[1].request)["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert len(events[2].sampled_ids) == 4 * final.usage.output_tokens
