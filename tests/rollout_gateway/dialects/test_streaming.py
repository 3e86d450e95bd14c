"""Chunks cut by the pattern and the same chunks decoded give the same record and the same output."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.dialects.streaming import _PIECE, StreamCapture

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


def captured(data: bytes, size: int, *, cut: bool) -> tuple[Any, ...]:
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    assert capture._plain
    capture._plain = cut
    seen = b"".join([capture.take(data[i : i + size]) for i in range(0, len(data), size)])
    return read(capture, seen + capture.last_events)


def read(capture: StreamCapture, seen: bytes) -> tuple[Any, ...]:
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
def test_cut_and_decoded_are_the_same(size: int) -> None:
    data = stream(*AWKWARD)
    events = data.split(b"\n\n")
    assert [bool(_PIECE.fullmatch(e)) for e in events] == [False, *[True] * len(AWKWARD), False, False, False]
    cut = captured(data, size, cut=True)
    assert cut == captured(data, size, cut=False)
    assert cut[3]["choices"][0]["message"]["content"] == "".join(AWKWARD)
    assert len(cut[1]) == len(cut[2]) == 4 * (len(AWKWARD) + 1)
    assert not any("token_ids" in c for reply in cut[4] for c in reply["choices"])
    assert all(c["logprobs"] is None for reply in cut[4] for c in reply["choices"])


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


@pytest.mark.timeout(60)
def test_a_long_event_in_short_portions_is_read_in_linear_time() -> None:
    """It took 92 s, in which the gateway answered nobody: each portion was copied with all before it."""
    content = "x" * (8 << 20)
    assert any(content in str(part) for part in captured(stream(content), 1000, cut=True))


def test_an_event_of_which_nothing_is_left_is_not_sent() -> None:
    """A program reads `choices[0]` of each event without usage."""
    capture = StreamCapture(read_chat(b'{"model":"m","messages":[],"stream":true}'))
    silent = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": [7]}
    event = json.dumps({**HEAD, "choices": [silent], "usage": None}).encode()
    assert capture.take(b"data: %b\n\n" % event) == b""
