"""A stream's chunks cut by their pattern and the same chunks decoded: the same record, the same for the client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rollout_gateway.dialects import CHAT
from rollout_gateway.streaming import _PIECE, StreamCapture

HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": "m@0"}


def chunk(content: str, token: int, **more: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token": content, "logprob": -token / 7, "bytes": [1, 2], "top_logprobs": []}]}
    choice = {"index": 0, "delta": {"content": content}, "logprobs": logprobs, "finish_reason": None}
    return {**HEAD, "choices": [{**choice, "token_ids": [token], **more}]}


def stream(*said: str) -> bytes:
    role = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    chunks = [{**HEAD, "choices": [role], "prompt_token_ids": [1, 2, 3]}]
    chunks += [chunk(content, number) for number, content in enumerate(said)]
    chunks += [chunk("", 99, finish_reason="stop", stop_reason=None)]
    out = [
        b"data: %b\n\n" % json.dumps(c, ensure_ascii=False, separators=(",", ":")).encode() for c in chunks
    ]
    return b"".join([*out, b"data: [DONE]\n\n"])


def captured(data: bytes, size: int, *, cut: bool) -> tuple[Any, ...]:
    capture = StreamCapture(CHAT, CHAT.read(b'{"model":"m","messages":[],"stream":true}'))
    assert capture._plain
    capture._plain = cut
    seen = b"".join([capture.take(data[i : i + size]) for i in range(0, len(data), size)]) + capture.held
    assert capture.ended
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


def test_chunks_of_another_shape_between_keep_their_order() -> None:
    parts = stream("a", "b", "c", "d").split(b"\n\n")
    odd = chunk("B", 1)
    odd["choices"][0]["new_field"] = {"x": 1}
    parts[2] = b"data: " + json.dumps(odd).encode()
    data = b"\n\n".join(parts)
    cut = captured(data, 50, cut=True)
    assert cut == captured(data, 50, cut=False)
    assert cut[3]["choices"][0]["message"]["content"] == "aBcd"
    assert cut[4][2]["choices"][0]["new_field"] == {"x": 1}
