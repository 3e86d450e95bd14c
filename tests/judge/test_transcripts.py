"""What a judge reads of a trajectory."""

from __future__ import annotations

import json

import msgspec
import pytest

from judge.transcripts import Transcript, common_prefix, from_exchanges, load, render, shorten
from pipeline.broker import Broker, HistoryGoneError
from pipeline.config import NatsConfig
from tests.judge.helpers import exchange, transcript

pytestmark = pytest.mark.anyio


def test_the_last_main_call_and_its_reply_are_the_transcript() -> None:
    found = from_exchanges(
        "t",
        [
            exchange("t", "second", seq=1, task="b"),
            exchange("t", "first", seq=0, task="a"),
            exchange("t", "a title", seq=2, side_call=True),
            exchange("t", "other choice", seq=1, choice=1, task="b"),
        ],
    )
    assert found.messages == ({"role": "user", "content": "b"}, {"role": "assistant", "content": "second"})


def test_a_trajectory_without_exchanges_is_gone() -> None:
    with pytest.raises(HistoryGoneError):
        from_exchanges("t", [])


async def test_a_transcript_comes_from_the_log(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await broker.publish(exchange("t", "hello"))
        assert render((await load(broker, "p", "t")).messages) == "[user] Win the game.\n[assistant] hello"
        with pytest.raises(HistoryGoneError):
            await load(broker, "p", "none")


def test_what_is_shared_ends_with_the_first_difference() -> None:
    assert common_prefix([transcript("a", "x", "y"), transcript("b", "x", "z")]) == 2
    assert common_prefix([transcript("a", "x"), transcript("b", "x", "z")]) == 2
    assert common_prefix([transcript("a", task="1"), transcript("b", task="2")]) == 0
    assert common_prefix([]) == 0


def test_every_kind_of_message_is_rendered() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "a door"},
        {"role": "assistant", "content": {"odd": 1}, "tool_calls": ["broken"]},
        {},
    ]
    assert render(messages) == (
        "[user] see\n(image_url)\n[assistant] (thinking) hm\n(calls look) {\"at\": 1}\n[tool look] a door\n"
        '[assistant] {"odd":1}\n(calls ?) \n[?] '
    )  # fmt: skip


def test_a_call_that_broke_off_has_no_reply() -> None:
    broken = msgspec.structs.replace(exchange("t", "x"), response=b"", status="failed")
    assert from_exchanges("t", [broken]).messages == ({"role": "user", "content": "Win the game."},)


def test_a_request_that_is_no_object_has_no_messages() -> None:
    odd = msgspec.structs.replace(
        exchange("t", "x"), request=b"[]", response=json.dumps({"choices": []}).encode()
    )
    assert from_exchanges("t", [odd]) == Transcript("t", ())


def test_what_is_cut_keeps_beginning_and_end() -> None:
    text = "a" * 500 + "b" * 500
    short = shorten(text, 300)
    assert len(short) <= 300
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert "700 characters left out" in short
    assert shorten(text, 1000) == text
