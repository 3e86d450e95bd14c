"""A stream is recorded whole, and its client gets it without what only the gateway asked for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from pipeline.events import unpack_ids, unpack_logprobs
from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.dialects.streaming import StreamCapture

MOVE: Any = {"type": "function", "function": {"name": "move", "strict": True, "parameters": {"type": "object"}}}
HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m@0"}


def chunk(content: str, token: int, **more: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token": content, "logprob": -token / 7, "bytes": [1, 2], "top_logprobs": []}]}
    choice = {"index": 0, "delta": {"content": content}, "logprobs": logprobs, "finish_reason": None}
    return {**HEAD, "choices": [{**choice, "token_ids": [token], **more}]}


def stream(*said: str) -> bytes:
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunks = [{**HEAD, "choices": [role], "prompt_token_ids": [1, 2, 3]}]
    chunks += [chunk(content, number) for number, content in enumerate(said)]
    chunks += [chunk("", 99, finish_reason="stop", stop_reason=None)]
    out = [b"data: %b\n\n" % json.dumps(c, ensure_ascii=False, separators=(",", ":")).encode() for c in chunks]
    return b"".join([*out, b"data: [DONE]\n\n"])


def captured(data: bytes, size: int) -> tuple[Any, ...]:
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    seen = b"".join([capture.take(data[i : i + size]) for i in range(0, len(data), size)]) + capture.last_events
    assert capture.ended
    assert capture.first_token_at
    answer = capture.answer()
    (choice,) = answer.choices
    client = [msgspec.json.decode(e[6:]) for e in seen.split(b"\n\n") if e]
    return answer.prompt_ids, choice.ids, choice.logprobs, msgspec.json.decode(answer.client_body()), client


AWKWARD = (
    "Hello",
    ' "quoted"',
    "\\",
    '\\"',
    '","logprobs":',
    '"finish_reason":null',
    "ü☃𝄞",
    "a\nb",
    "",
    "\u2028",
    "}]}",
)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_a_stream_in_portions_of_any_size_is_recorded_whole(size: int) -> None:
    prompt_ids, ids, logprobs, answer, client = captured(stream(*AWKWARD), size)
    assert answer["choices"][0]["message"]["content"] == "".join(AWKWARD)
    sampled = [*range(len(AWKWARD)), 99]
    assert (unpack_ids(prompt_ids).tolist(), unpack_ids(ids).tolist()) == ([1, 2, 3], sampled)
    assert unpack_logprobs(logprobs).tolist() == pytest.approx([-token / 7 for token in sampled])
    said = [reply["choices"][0] for reply in client]
    assert "".join(choice["delta"]["content"] for choice in said) == "".join(AWKWARD)
    assert all("token_ids" not in choice and choice["logprobs"] is None for choice in said)


@pytest.mark.parametrize("parts", [['{"cell":"a1"}'], ['{"cell":', '"a1"}']])
def test_openai_client_reads_a_call_whose_parts_share_a_chunk(parts: list[str]) -> None:
    """vLLM's parser sends so what it could not send before, under load. The client raised `TypeError`."""
    name = {"index": 0, "id": "t-0", "type": "function", "function": {"name": "move"}}
    arguments = [{"index": 0, "function": {"arguments": part}} for part in parts]
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    choice = {"index": 0, "delta": {"role": "assistant", "tool_calls": [name, *arguments]}}
    shown = b"".join(
        capture.take(b"data: %b\n\n" % json.dumps({**HEAD, "choices": [said]}).encode())
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
    assert capture.take(b"data: %b\n\n" % event) == b""
