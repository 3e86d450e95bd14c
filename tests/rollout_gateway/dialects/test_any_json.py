"""Whatever JSON an inference server sends, the call ends in an answer or in an error that says what is wrong with it;
whatever JSON a client sends is a call or a 400."""

import json
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.chat.conversations import build_conversations
from rollout_gateway.capture.conversations import quotes
from rollout_gateway.capture.detection import _conversation
from rollout_gateway.dialects.calls import CHAT, Call
from rollout_gateway.dialects.endpoints import MALFORMED, read_answer, read_chat, read_completion
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.dialects.prompts import read_original, with_prompt
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.shape import shape_problem
from rollout_gateway.dialects.streaming import DONE, StreamCapture
from rollout_gateway.dialects.translate import TranslatedSink, Translation
from rollout_gateway.http.errors import ApiError
from tests.rollout_gateway.dialects.kit import recorded
from tests.rollout_gateway.dialects.shapes import CLAUDE_CODE, CODEX

NUMBERS = ("1e400", "1" + "0" * 30, "5", "-1", "0.5")
TEXTS = ('"\\ud83d"', '"x"', '""', '"{\\"a\\": 1e400}"')
LISTS = ("[]", "[[]]", "[5]", "[" * 150 + "]" * 150)
OBJECTS = ("{}", '{"a":5}', '{"a":' * 150 + "1" + "}" * 150)
ODD = (*NUMBERS, *TEXTS, *LISTS, *OBJECTS, "null", "true")
"""JSON in the place of something else."""

CALLED = {"id": "call_1", "type": "function", "function": {"name": "exec", "arguments": '{"a": 1}'}}
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": [1], "top_logprobs": []}]}
USAGE = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
HEAD = {"id": "chatcmpl-7f", "object": "chat.completion", "created": 7, "model": "m@0", "prompt_token_ids": [1, 2]}
REPLY = {
    **HEAD,
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [7],
            "logprobs": LOGPROBS,
            "message": {"role": "assistant", "content": "a", "reasoning": "b", "tool_calls": [CALLED, CALLED]},
        }
    ],
    "usage": USAGE,
}


def chunk(delta: Any, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": LOGPROBS, "finish_reason": finish, "token_ids": [7]}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice], **more}


STREAM = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "a"}),
    chunk({"reasoning": "b"}),
    chunk({"tool_calls": [{"index": 0, **CALLED}]}),
    chunk({}, "stop", usage=USAGE),
    {**HEAD, "choices": [], "usage": USAGE},
    {"error": {"message": "x", "code": 500}},
]

HISTORY = [
    {"role": "system", "content": "Be safe."},
    {"role": "user", "content": [{"type": "text", "text": "go"}]},
    {"role": "assistant", "content": None, "reasoning": "b", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
]
CHAT_FIELDS = {
    "tools": [{"type": "function", "function": {"name": "exec"}}],
    "tool_choice": "auto",
    "n": 1,
    "metadata": {"a": 1},
    "response_format": {"type": "text"},
}
BODIES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "chat": (read_chat, [{"messages": HISTORY, **CHAT_FIELDS}]),
    "completions": (read_completion, [{"prompt": ["a"], "n": 1}]),
    "messages": (MessagesTranslation, [{"max_tokens": 5, **shape} for shape in CLAUDE_CODE.values()]),
    "responses": (ResponsesTranslation, list(CODEX.values())),
}
KINDS: tuple[type[Translation], ...] = (MessagesTranslation, ResponsesTranslation)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for name, one in inner for place in places(one, (*at, name)))]


@st.composite
def odd(draw: st.DrawFn, usual: Any) -> bytes:
    """`usual` as JSON, with up to three values replaced or left out, or a list's element repeated."""
    body = [deepcopy(usual)]
    for number in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from([place for place in places(body) if place]))
        inner: Any = body
        for name in way:
            inner = inner[name]
        match draw(st.sampled_from(("replace", "replace", "leave out", "repeat"))):
            case "leave out" if way:
                del inner[last]
            case "repeat" if isinstance(inner, list) and way:
                inner.extend(deepcopy([inner[last]] * draw(st.sampled_from((1, 5000)))))
            case _:
                inner[last] = f"@{number}@"
    text = json.dumps(body[0])
    for number in range(3):
        text = text.replace(f'"@{number}@"', draw(st.sampled_from(ODD)))
    return text.encode()


def follow(call: Call, message: Any) -> None:
    """Read a call and the message of its answer as detection and judge do."""
    try:
        answered = _conversation("", "m", call.fields).with_answer(message)
    except ApiError as error:
        if error.status != 400:
            raise
        return
    assert quotes(answered, []) is not None
    assert answered.histories is not None
    exchange = recorded({}, message if isinstance(message, dict) else {})
    build_conversations([msgspec.structs.replace(exchange, request=msgspec.Raw(call.body))])


def translations(**more: Any) -> list[Translation]:
    bodies = ({"model": "m", "messages": []}, {"model": "m", "input": "x"})
    return [kind(json.dumps({**b, **more}).encode()) for kind, b in zip(KINDS, bodies, strict=True)]


many = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@many
@given(odd(REPLY), st.booleans())
def test_any_reply_is_an_answer_or_malformed(body: bytes, logprobs: bool) -> None:
    call = read_chat(json.dumps({"model": "m", "messages": [], "logprobs": logprobs}).encode())
    try:
        answer = read_answer(body, call)
    except MALFORMED:
        return
    message = msgspec.json.decode(answer.client_body())["choices"][0]["message"]
    call.forced_mask(answer.choices[0])
    follow(call, message)
    for translation in translations():
        msgspec.json.encode(translation.answer(msgspec.json.decode(answer.client_body())))


@many
@given(st.lists(st.sampled_from(STREAM).flatmap(odd), max_size=6), st.booleans(), st.booleans())
@example(
    [json.dumps(chunk({}, "stop", prompt_token_ids=n)).replace('"@"', "1e400").encode() for n in ([1], "@")], True, True
)
def test_any_stream_is_an_answer_or_malformed(events: list[bytes], logprobs: bool, ids: bool) -> None:
    asked = {"logprobs": logprobs, "return_token_ids": ids, "stream": True}
    call = read_chat(json.dumps({"model": "m", "messages": [], **asked}).encode())
    capture = StreamCapture(call)
    sinks = [TranslatedSink(Mock(), translation) for translation in translations(stream=True)]
    try:
        for event in events:
            seen = capture.feed(b"data: %b\n\n" % event)
            for sink in sinks:
                sink.translate(seen)
    except MALFORMED:
        pass
    answer = capture.answer()
    for choice in answer.choices:
        follow(call, msgspec.json.decode(choice.fields["message"]))
    for sink in sinks:
        sink.translate(capture.last_events + DONE)
        sink.last_events()


@pytest.mark.parametrize("endpoint", BODIES)
@many
@given(data=st.data())
def test_any_body_is_a_call_or_a_400(endpoint: str, data: st.DataObject) -> None:
    read, shapes = BODIES[endpoint]
    body = data.draw(st.sampled_from([{"model": "m", **shape} for shape in shapes]).flatmap(odd))
    read_original(body)
    for path in (CHAT, *(kind.path for kind in KINDS)):
        changed = with_prompt(path, body, "s", "t")
        assert changed is None or json.loads(changed).keys() == json.loads(body).keys()
    try:
        call = read(body)
        if isinstance(call, Translation):
            translation, call = call, call.call()
            translation.merge_system()
            translation.call()
            msgspec.json.encode(translation.whole_answer())
        Permitted().check(call.fields)
    except ApiError as error:
        if error.status not in (400, 413):
            raise
        return
    shape_problem(call.fields)
    assert call.hash()
    follow(call, {"role": "assistant", "content": "ok"})


def test_half_a_surrogate_pair_is_no_json() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
    with pytest.raises(ApiError, match=r"not valid JSON: .*byte 65") as refused:
        read_chat(body)
    assert refused.value.status == 400
    assert read_chat(body.replace(b"\\ud83d", b"\\ud83d\\ude00")).choices == 1
