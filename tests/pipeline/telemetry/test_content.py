"""What a call says, in each of the APIs that clients speak."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.telemetry.content import answered_tools, conversation, messages

CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": '{"mail":"a"}'}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "count", "arguments": "{}"}}
OLD = {"id": "c0", "type": "function", "function": {"name": "old", "arguments": "{}"}}


def item(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call["id"], **call["function"]}


def output(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["id"], "output": text}


def use(call: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def used(call: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text}


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None, "tool_calls": [OLD]},
        {"role": "tool", "tool_call_id": "c0", "content": "nothing"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "c1", "content": "Ann"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Who?"},
        item(OLD),
        output(OLD, "nothing"),
        {"type": "reasoning", "summary": []},
        item(CALL),
        item(OTHER),
        output(CALL, "Ann"),
        output(OTHER, "2"),
    ],
}
ANTHROPIC: dict[str, Any] = {
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": [use(OLD, {})]},
        {"role": "user", "content": [used(OLD, "nothing")]},
        {"role": "assistant", "content": [use(CALL, {"mail": "a"}), use(OTHER, {})]},
        {"role": "user", "content": [used(CALL, "Ann"), used(OTHER, "2")]},
    ],
}


@pytest.mark.parametrize("request_", [CHAT, RESPONSES, ANTHROPIC], ids=["chat", "responses", "messages"])
def test_tools_are_found_in_each_api(request_: dict[str, Any]) -> None:
    assert answered_tools(request_) == [(CALL, "Ann"), (OTHER, "2")]
    parts = [part["type"] for message in messages(conversation(request_)) for part in message["parts"]]
    called, answered = "tool_call", "tool_call_response"
    assert parts == ["text", "text", called, answered, called, called, answered, answered]


def test_texts_beside_tools_stay() -> None:
    blocks = [{"type": "text", "text": "I look."}, use(CALL, {"mail": "a"})]
    said = conversation({"messages": [{"role": "assistant", "content": blocks}]})
    assert said == [{"role": "assistant", "content": blocks[:1], "tool_calls": [CALL]}]
    blocks = [used(CALL, "Ann"), {"type": "text", "text": "And now?"}]
    assert conversation({"messages": [{"role": "user", "content": blocks}]}) == [
        {"role": "tool", "tool_call_id": "c1", "content": "Ann"}, {"role": "user", "content": blocks[1:]},
    ]  # fmt: skip


def test_the_arguments_of_a_custom_tool_are_its_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"}
    answer = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    (found,) = answered_tools({"input": [call, answer]})
    assert (found[0]["function"], found[1]) == ({"name": "patch", "arguments": "*** Begin"}, "done")


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": "Who?"}, {"input": "Who?"}, {"messages": "?"}, {"input": [output(CALL, "Ann")]}, {},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Ann."}, {"role": "user", "content": "Ok"}]},
        {"messages": [1, {"role": "assistant", "tool_calls": [2]}, {"role": "tool"}]},
    ],
)  # fmt: skip
def test_calls_that_bring_no_result_have_no_tools(request_: dict[str, Any]) -> None:
    assert answered_tools(request_) == []
