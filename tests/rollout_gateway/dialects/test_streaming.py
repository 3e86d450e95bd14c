"""What clients of streams stumble over. `test_streams.py` has streams of any shape, in portions of any size."""

import json
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.dialects.streaming import StreamCapture

MOVE: Any = {"type": "function", "function": {"name": "move", "strict": True, "parameters": {"type": "object"}}}
HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m@0"}


@pytest.mark.parametrize("parts", [['{"cell":"a1"}'], ['{"cell":', '"a1"}']])
def test_openai_client_reads_a_call_whose_parts_share_a_chunk(parts: list[str]) -> None:
    """vLLM's parser sends so what it could not send before, under load. The client raised `TypeError`."""
    name = {"index": 0, "id": "t-0", "type": "function", "function": {"name": "move"}}
    arguments = [{"index": 0, "function": {"arguments": part}} for part in parts]
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    choice = {"index": 0, "delta": {"role": "assistant", "tool_calls": [name, *arguments]}}
    shown = b"".join(
        capture.feed(b"data: %b\n\n" % json.dumps({**HEAD, "choices": [said]}).encode())
        for said in (choice, {"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    )
    state = ChatCompletionStreamState(input_tools=[MOVE])
    for event in (shown + capture.last_events).split(b"\n\n")[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")))
    (call,) = state.get_final_completion().choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == {"cell": "a1"}
    recorded = msgspec.json.decode(capture.answer().client_body())["choices"][0]["message"]
    assert recorded["tool_calls"][0]["function"] == {"name": "move", "arguments": '{"cell":"a1"}'}


def test_an_event_of_which_nothing_is_left_is_not_sent() -> None:
    """A program reads `choices[0]` of each event without usage."""
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    silent = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": [7]}
    event = json.dumps({**HEAD, "choices": [silent], "usage": None}).encode()
    assert capture.feed(b"data: %b\n\n" % event) == b""
