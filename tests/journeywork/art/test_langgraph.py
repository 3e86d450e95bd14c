"""Calls of a wrapped rollout, however its client asks for them and writes them."""

import asyncio
import json
from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.langgraph import init_chat_model, wrap_rollout
from journeywork.art.langgraph.conversations import add_call
from tests.journeywork.art.compatibility.kit import Served, served

__all__ = ["served"]  # a fixture

TOP = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
REFERENCE = {"trajectory": "t", "reply": "c"}


def chunk(delta: dict[str, Any], **fields: Any) -> str:
    return f"data: {json.dumps({**TOP, 'choices': [{'index': 0, 'delta': delta, **fields}]})}\n\n"


def stream(end: str) -> bytes:
    call = {"index": 0, "id": "i", "type": "function", "function": {"name": "look", "arguments": '{"at"'}}
    more = {"index": 0, "function": {"arguments": ":1}"}}
    said = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    chunks = [chunk(delta) for delta in (*said, {"tool_calls": [call]}, {"tool_calls": [more]})]
    return "".join([": keep-alive\n\n", *chunks, end]).encode()


def test_a_stream_is_the_completion_that_it_makes_up_with_its_reference() -> None:
    made, request = art.Trajectory(), {"messages": [{"role": "user", "content": "a"}]}
    add_call(made, request, stream(""))
    assert made.messages_and_choices == [], "it was cut off"
    end = chunk({}, finish_reason="tool_calls", journeywork=REFERENCE) + "data: [DONE]\n\n"
    add_call(made, request, stream(end))
    choice: Any = made.messages_and_choices[1]
    assert (choice.message.content, choice.finish_reason) == ("ab", "tool_calls")
    (call,) = choice.message.tool_calls
    assert call.model_dump()["function"].items() >= {"name": "look", "arguments": '{"at":1}'}.items()
    assert choice.model_extra == {"journeywork": REFERENCE}
    add_call(made, request, b'{"error": "no completion"}')
    assert (len(made.messages_and_choices), made.additional_histories) == (2, [])


def test_a_call_whose_arguments_a_client_wrote_anew_continues_the_conversation() -> None:
    """As LangChain does, which reads them and writes them with spaces and escapes of its own."""

    def call(arguments: str) -> dict[str, Any]:
        return {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}

    def answer(arguments: str) -> bytes:
        message = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return json.dumps({**TOP, "object": "chat.completion", "choices": [choice]}).encode()

    made, chat = art.Trajectory(), [{"role": "user", "content": "a"}]
    add_call(made, {"messages": chat}, answer('{"q":"é",\n"n":1}'))
    again: Any = [
        {"role": "assistant", "tool_calls": [call(json.dumps({"n": 1, "q": "é"}))]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    add_call(made, {"messages": chat + again}, answer('{"q": 2}'))
    assert [m["role"] for m in made.messages()] == ["user", "assistant", "tool", "assistant"]
    assert made.additional_histories == []
    add_call(made, {"messages": chat, "tools": []}, answer("{}"))
    assert len(made.additional_histories) == 1, "another conversation"


async def play(text: str) -> art.Trajectory:
    chat = init_chat_model(temperature=1.0)
    await chat.ainvoke([("user", text)])
    await asyncio.to_thread(chat.invoke, [("user", f"{text} in a thread")])
    async for _ in chat.astream([("user", f"{text} as a stream")]):
        pass
    return art.Trajectory(reward=1.0)


async def test_rollouts_at_the_same_time_do_not_mix(served: Served) -> None:
    pytest.importorskip("langchain_openai")
    model = art.Model(name="gpt", project="p", inference_api_key="k", inference_base_url=served.url)
    for made, text in zip(await asyncio.gather(*map(wrap_rollout(model, play), "ab")), "ab", strict=True):
        conversations = [made, *made.additional_histories]
        assert [c.messages()[0].get("content") for c in conversations] == [
            text,
            f"{text} in a thread",
            f"{text} as a stream",
        ]
        assert all(c.messages()[1].get("content") == "after 1" for c in conversations)
    with pytest.raises(RuntimeError, match="wrap_rollout"):
        init_chat_model()
