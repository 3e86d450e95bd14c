"""Answers of providers as the record holds them, and as a retry gets them again."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.config import OutsideConfig
from rollout_gateway.dialects.calls import Fields
from rollout_gateway.outside.answers import OutsideAnswer, replay_answer
from rollout_gateway.outside.requests import PATHS, OutsideCall, read_call
from tests.rollout_gateway.outside.provider import (
    MESSAGE,
    RESPONSE,
    USAGE,
    chunks,
    completion,
    message_events,
    response_events,
    stream,
)


def call_of(dialect: Any, **body: Any) -> OutsideCall:
    table = OutsideConfig(name="master", url="http://x", dialect=dialect)
    sent = {"model": "master", "messages": [], "input": [], "stream": True, **body}
    call = read_call(PATHS[dialect], json.dumps(sent).encode(), {"master": [table]})
    assert call is not None
    return call


def answer_of(dialect: Any, *events: Any) -> OutsideAnswer:
    call = call_of(dialect)
    told = OutsideAnswer(call, call.tables[0])
    for event in stream(*events).body:
        assert isinstance(event, bytes)
        told.feed_event(event.partition(b"data: ")[2].strip())
    return told


def data(streamed: bytes) -> list[Any]:
    return [json.loads(e.partition(b"data: ")[2]) for e in streamed.split(b"\n\n") if e.strip() and b"[DONE]" not in e]


@pytest.mark.parametrize(("dialect", "events"), [("messages", message_events()), ("responses", response_events())])
def test_recorded_answers_come_again_as_streams(dialect: Any, events: list[Any]) -> None:
    told = answer_of(dialect, *events)
    again = answer_of(dialect, *data(replay_answer(call_of(dialect), told.answer().fields)))
    assert (again.native, again.ended, again.error) == (told.native, True, "")
    if dialect == "messages":
        assert told.native == MESSAGE


def test_replay_has_the_usage_that_the_agent_asked_for_alone() -> None:
    recorded: Fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in completion().items()}
    asking = call_of("chat", stream_options={"include_usage": True})
    assert data(replay_answer(asking, recorded))[-1]["usage"] == USAGE
    assert not any("usage" in chunk for chunk in data(replay_answer(call_of("chat"), recorded)))


def test_several_messages_of_a_responses_answer_are_one_with_all_they_say() -> None:
    items: list[Any] = RESPONSE["output"]
    again = [item | {"call_id": "call_2"} if item["type"] == "function_call" else item for item in items]
    call = call_of("responses")
    told = OutsideAnswer(call, call.tables[0])
    told.read(json.dumps({**RESPONSE, "output": [*items, *again]}).encode())
    message = msgspec.json.decode(told.answer().choices[0].fields["message"])
    assert message["content"] == "the answer\nthe answer"
    assert message["reasoning"].count("thought") == 2
    assert [c["id"] for c in message["tool_calls"]] == ["call_1", "call_2"]


def test_flat_error_of_the_responses_api_is_an_error() -> None:
    flat = {"type": "error", "code": "server_error", "message": "overloaded", "param": None, "sequence_number": 3}
    told = answer_of("responses", *response_events()[:3], flat)
    assert (told.error, told.finishing) == ("the provider ended the stream: overloaded", True)


def test_null_in_place_of_a_list_is_an_empty_one() -> None:
    told = answer_of("chat", *chunks()[:2], {"id": "chatcmpl-1", "choices": None}, *chunks()[2:])
    assert (told.error, told.ended) == ("", True)
    start, *rest = message_events()
    block = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    }
    cited = {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {"n": 1}}}
    told = answer_of("messages", start, block, cited, *rest[-2:])
    assert told.error == ""
    assert told.native["content"][0]["citations"] == [{"n": 1}]


def test_more_choices_than_a_call_may_ask_for_are_not_recorded() -> None:
    """Each would be an event of the run."""
    call = call_of("chat", stream=False)
    many = OutsideAnswer(call, call.tables[0])
    many.read(msgspec.json.encode({"choices": [{"message": {"content": "x"}}] * 1025}))
    assert many.answer().choices == []
    assert "1,025 choices" in many.error
