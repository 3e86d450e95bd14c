"""A streamed reply of any shape is one reply: as it was recorded, so the client of another API sends it back."""

import itertools
import json
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.chat.conversations import build_conversations
from pipeline.events import unpack_ids, unpack_logprobs
from rollout_gateway.capture.conversations import CallMessages
from rollout_gateway.dialects.calls import Answer
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.streaming import DONE, StreamCapture
from rollout_gateway.dialects.translate import TranslatedSink, Translation
from tests.rollout_gateway.dialects.kit import recorded

NAMES = ("exec", "apply")
HEAD = {"id": "chatcmpl-7f", "object": "chat.completion.chunk", "created": 7, "model": "m@0"}
CHAT_TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
CLAUDE_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]

Delta = dict[str, Any]


def cut(text: str, at: list[int]) -> list[str]:
    """`text` in pieces."""
    places = [0, *sorted(min(place, len(text)) for place in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@st.composite
def calls(draw: st.DrawFn) -> list[list[Delta]]:
    """The deltas of each tool call of a reply."""
    way = draw(st.sampled_from(("indexes", "one index", "ids in each")))
    out = []
    for number in range(draw(st.integers(0, 3))):
        name, arguments = (
            draw(st.sampled_from(NAMES)),
            draw(st.sampled_from(("", "{}", '{"a":1}', '{"b": [2, "x"]}'))),
        )
        names = cut(name, draw(st.lists(st.integers(0, 5), max_size=2)))
        pieces = [{"name": part} for part in names]
        pieces += [{"arguments": part} for part in cut(arguments, draw(st.lists(st.integers(0, 9), max_size=3)))]
        identity = f"call_{number}" if way != "indexes" or draw(st.booleans()) else draw(st.sampled_from((None, "")))
        deltas: list[Delta] = [{"index": number if way == "indexes" else 0, "function": piece} for piece in pieces]
        for delta in deltas if way == "ids in each" else deltas[:1]:
            delta |= {"id": identity, "type": "function"}
        out.append(deltas)
    if way == "one index":
        return [[delta for deltas in out for delta in deltas]]
    return out


@st.composite
def replies(draw: st.DrawFn) -> list[Delta]:
    """The deltas of a reply: those of each call in their order, by turns with text and reasoning."""
    ways = [[{"tool_calls": [delta]} for delta in deltas] for deltas in draw(calls())]
    texts = st.sampled_from(("a", "b c", "\n", "", "\n\n", '","logprobs":', '\\"', "ü☃𝄞", "}]}", "\u2028"))
    ways.append(draw(st.lists(st.fixed_dictionaries({}, optional={"content": texts, "reasoning": texts}), max_size=5)))
    out: list[Delta] = []
    while ways := [way for way in ways if way]:
        out.append(draw(st.sampled_from(ways)).pop(0))
    return out


def expected(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning, and the names and arguments of the calls of a reply, in the order in which they begin."""
    said: dict[Any, list[str]] = {}
    newest: dict[int, Any] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        index = call["index"]
        key = (index, call["id"]) if call.get("id") else newest.get(index, (index, ""))
        newest[index] = key
        parts = said.setdefault(key, ["", ""])
        parts[0] += call["function"].get("name", "")
        parts[1] += call["function"].get("arguments", "")
    content, reasoning = ("".join(d.get(kind, "") for d in deltas) for kind in ("content", "reasoning"))
    return content, reasoning, [(name, json.loads(arguments or "{}")) for name, arguments in said.values()]


def told(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    called = [(f["name"], json.loads(f["arguments"] or "{}")) for f in functions]
    return message.get("content") or "", message.get("reasoning") or "", called


def ids(message: dict[str, Any]) -> list[str]:
    return [call["id"] for call in message.get("tool_calls") or ()]


def chunks(deltas: list[Delta]) -> list[dict[str, Any]]:
    """The chunks of a stream. Each of `deltas` is a token: its number is the token's id, and the eighth of it,
    negative, its logprob."""
    first = {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
    out = [{**HEAD, "choices": [first], "prompt_token_ids": [1, 2, 3]}]
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": [number]}
        out.append({**HEAD, "choices": [{**choice, "logprobs": {"content": [{"logprob": -number / 8}]}}]})
    return [*out, {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


@st.composite
def server_sent(draw: st.DrawFn, events: list[dict[str, Any]]) -> bytes:
    """The events in a form that the grammar of event streams permits."""
    line = draw(st.sampled_from((b"\n", b"\r\n", b"\r")))
    before = st.lists(
        st.sampled_from((b": ping", b"event: message", b"id: 1", b"retry: 5", b"", b"x", b":")), max_size=2
    )
    out = draw(st.sampled_from((b"", b"\xef\xbb\xbf")))
    for event in events:
        space = draw(st.sampled_from((b"", b" ")))
        lines = json.dumps(event, indent=draw(st.sampled_from((None, 1))), ensure_ascii=False).encode().split(b"\n")
        fields = [*draw(before), *(b"data:" + space + part for part in lines)]
        out += b"".join(field + line for field in (*fields, *draw(before))) + line
    return out + b"data: [DONE]" + line + line


def captured(data: bytes, size: int, sink: TranslatedSink) -> tuple[Answer, bytes]:
    """Give a stream, in portions of a size, to the record and to the client. Returns the record, and what the client
    gets."""
    written = b""
    capture = StreamCapture(sink._translation.call())
    for at in range(0, len(data), size):
        if seen := capture.feed(data[at : at + size]):
            assert all(event.count(b"\n") == 0 for event in seen.split(b"\n\n"))
            assert b"token_ids" not in seen
            written += sink.translate(seen)
    assert capture.ended
    assert capture.error_code == 0
    written += sink.translate(capture.last_events + DONE) + sink.last_events()
    return capture.answer(), written


def translation_of(kind: type[Translation], history: list[Any], **more: Any) -> Translation:
    if kind is MessagesTranslation:
        body = {"model": "m", "max_tokens": 9, "messages": history, "tools": CLAUDE_TOOLS}
    else:
        body = {"model": "m", "input": history, "tools": CHAT_TOOLS}
    return kind(json.dumps({**body, **more}).encode())


def claude_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content as Anthropic's clients collect it: by the index of each event."""
    blocks: dict[int, dict[str, Any]] = {}
    inputs: dict[int, str] = {}
    stopped = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                assert event["index"] not in stopped
                block, (kind, field) = blocks[event["index"]], list(event["delta"])
                if event["delta"][kind] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"][field]
                else:
                    block[field] += event["delta"][field]
            case "content_block_stop":
                stopped.append(event["index"])
    assert stopped == list(blocks)
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return list(blocks.values())


def codex_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as Codex collects them, which sends no ids back."""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert done == events[-1]["response"]["output"]
    return [{name: value for name, value in item.items() if name != "id"} for item in done]


USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize("kind", [MessagesTranslation, ResponsesTranslation])
@given(data=st.data(), deltas=replies(), size=st.sampled_from((1, 2, 7, 100, 100_000)))
def test_a_client_sends_back_what_was_recorded(
    kind: type[Translation], data: st.DataObject, deltas: list[Delta], size: int
) -> None:
    sink = TranslatedSink(Mock(), translation_of(kind, [USER], stream=True))
    answer, written = captured(data.draw(server_sent(chunks(deltas))), size, sink)
    (choice,) = answer.choices
    assert unpack_ids(answer.prompt_ids).tolist() == [1, 2, 3]
    assert unpack_ids(choice.ids).tolist() == list(range(len(deltas)))
    assert unpack_logprobs(choice.logprobs).tolist() == [-number / 8 for number in range(len(deltas))]
    message = dict(msgspec.json.decode(answer.client_body())["choices"][0]["message"])
    assert told(message) == expected(deltas)
    assert len(set(ids(message))) == len(ids(message))
    assert all(ids(message))

    events = [json.loads(e.partition(b"data: ")[2]) for e in written.split(b"\n\n") if e]
    if kind is MessagesTranslation:
        history = [USER, {"role": "assistant", "content": claude_blocks(events)}]
    else:
        history = [USER, *codex_items(events)]
    call = translation_of(kind, [*history, USER]).call()
    messages = json.loads(call.body)["messages"]
    said = messages[1:-1]
    if told(message) == ("", "", []):
        assert kind is MessagesTranslation or said == []
        return
    assert [told(m) for m in said] == [told(message)]
    assert ids(said[0]) == ids(message)

    first = recorded(json.loads(sink._translation.call().body), message)
    second = msgspec.structs.replace(recorded(json.loads(call.body), {"role": "assistant", "content": "ok"}), seq=1)
    (conversation,), _ = build_conversations([first, second])
    assert conversation.follow_up(conversation.replies[0]) == (USER,)
    waiting = CallMessages.read("", "m", [USER], []).with_answer(message).histories[-1]
    assert waiting in CallMessages.read("", "m", messages, []).possible_histories()


def test_an_error_of_null_is_none_and_any_other_ends_the_stream() -> None:
    def failed(*events: Any) -> tuple[StreamCapture, list[Any]]:
        written = b""
        sink = TranslatedSink(Mock(), translation_of(ResponsesTranslation, [USER], stream=True))
        capture = StreamCapture(sink._translation.call())
        for event in events:
            written += sink.translate(capture.feed(b"data: %b\n\n" % json.dumps(event).encode()))
        written += sink.last_events()
        return capture, [json.loads(e.partition(b"data: ")[2]) for e in written.split(b"\n\n") if e]

    first = chunks([{"content": "a"}])[1]
    for fine in (first | {"error": None}, {"error": None}, {"object": "ping"}):
        capture, events = failed(first, fine)
        assert capture.error_code == 0
        assert events[-1]["type"] == "response.completed"
    for error, code in (({"message": "x", "code": 400}, 400), ({"message": "x", "code": "busy"}, 500), ("x", 500)):
        capture, events = failed(first, {"error": error})
        assert capture.error_code == code
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["message"] == "x"
