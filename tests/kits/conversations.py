"""Random runs: conversations that grow, branch, forget, repeat and fail."""

import json
from typing import Any

from hypothesis import strategies as st

from pipeline.events import ExchangeRecorded
from tests.kits import events

CHUNK = 500
"""Tokens of a message: enough that an exchange is not too small to be continued."""


def exchange(
    seq: int, prompt: list[int], sampled: list[int], request: bytes, *, choice: int = 0, **more: Any
) -> ExchangeRecorded:
    """An exchange of trajectory `t` whose `at` is unique."""
    of_call = {"choice": choice, "policy_version": "m@1", "step": 1, "request": request, **more}
    return events.exchange("t", seq, prompt, sampled, at=1_000_000 * (seq + 1) + choice, **of_call)


def chat(messages: list[str], temperature: float = 1.0) -> bytes:
    """A request body with these messages."""
    said = [{"role": "user", "content": m} for m in messages]
    tools = [{"name": "look", "description": "d" * 200}]
    return json.dumps({"model": "m", "messages": said, "temperature": temperature, "tools": tools}).encode()


def answer(text: str) -> bytes:
    """A response with this reply."""
    return json.dumps({"id": "r", "choices": [{"message": {"content": text, "role": "assistant"}}]}).encode()


def growing(turns: int, start: int = 0) -> list[ExchangeRecorded]:
    """A run in which every call repeats everything before it."""
    prompt, said, out = [1] * CHUNK, ["s" * CHUNK * 4], []
    for seq in range(start, start + turns):
        reply, text = [100 + seq] * CHUNK, f'reply "{seq}"\n' * CHUNK
        out.append(exchange(seq, prompt, reply, chat(said), response=answer(text)))
        prompt = prompt + reply + [200 + seq] * CHUNK
        said = [*said, text, f"question {seq}" * CHUNK]
    return out


@st.composite
def runs(draw: st.DrawFn) -> list[ExchangeRecorded]:
    """The exchanges of one trajectory, in the order of the log."""
    out: list[ExchangeRecorded] = []
    heard: list[tuple[list[int], list[str]]] = [([], [])]
    """What was said up to the end of each call: tokens and messages."""
    for seq in range(draw(st.integers(1, 8))):
        tokens, said = heard[draw(st.integers(0, len(heard) - 1))]
        kept = draw(st.sampled_from([len(tokens), len(tokens), len(tokens) // 2, 7, 0]))
        kept_messages = draw(st.sampled_from([len(said), len(said), len(said) // 2]))
        prompt = tokens[:kept] + [draw(st.integers(0, 3))] * draw(st.sampled_from([0, 1, CHUNK, 4 * CHUNK]))
        messages = [*said[:kept_messages], draw(st.sampled_from("xyz")) * draw(st.sampled_from([1, 3_000]))]
        request = chat(messages, draw(st.sampled_from([0.5, 1.0])))
        if draw(st.integers(0, 9)) == 0:
            request = draw(st.binary(max_size=20)) + request[: draw(st.integers(0, len(request)))]
        if draw(st.integers(0, 9)) == 0:
            out.append(exchange(seq, [], [], request, status="failed"))
            continue
        for choice in range(draw(st.sampled_from([1, 1, 1, 3, 6]))):
            sampled = [draw(st.integers(4, 7))] * draw(st.sampled_from([0, 1, CHUNK]))
            reply = draw(st.sampled_from(["yes", "x" * 100, '"quoted" \\ ä'])) * (1 + len(sampled) // 10)
            out.append(exchange(seq, prompt, sampled, request, choice=choice, response=answer(reply)))
            heard.append((prompt + sampled, [*messages, reply] if draw(st.booleans()) else messages))
    return out
