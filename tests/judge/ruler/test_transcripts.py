"""Trajectories as text for the judge."""

from collections.abc import Iterable

import pytest

from judge.ruler.transcripts import from_exchanges, load_transcript, render_message, shorten, utf8_size
from pipeline.chat.conversations import Message
from pipeline.log.broker import Broker, HistoryGoneError
from tests.judge.kit import exchange


def rendered(messages: Iterable[Message]) -> str:
    return "\n".join(render_message(m) for m in messages)


def test_a_trajectory_without_a_call_to_judge_is_told_with_both_causes() -> None:
    with pytest.raises(HistoryGoneError, match=r"^trajectory t has no recorded call .* sent none .* retention"):
        from_exchanges("t", [])


async def test_a_transcript_comes_from_the_log(broker: Broker) -> None:
    await broker.publish(exchange("t", "hello"))
    assert (
        rendered((await load_transcript(broker, "p", "t")).last_conversation.messages)
        == "[user] Win the game.\n[assistant] hello"
    )
    with pytest.raises(HistoryGoneError):
        await load_transcript(broker, "p", "none")


def test_every_kind_of_message_is_rendered() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "a door"},
        {"role": "assistant", "content": {"odd": 1}, "tool_calls": ["broken"]},
        {"role": "assistant", "refusal": "no", "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "free", "input": "text"}}]},
        {},
    ]
    assert rendered(messages) == (
        '[user] see\n(image_url)\n[assistant] (thinking) hm\n(calls look) {"at": 1}\n[tool look] a door\n'
        '[assistant] {"odd":1}\n(calls ?) \n[assistant] (refuses) no\n(calls old) {}\n'
        "[assistant] (calls free) text\n[?] "
    )


@pytest.mark.parametrize("letters", ["ab", "äß", "世界", "🙂🙃"])
def test_shorten_keeps_the_beginning_and_the_end(letters: str) -> None:
    text = letters[0] * 500 + letters[1] * 500
    short = shorten(text, 300)
    assert utf8_size(short) <= 300
    assert short.startswith(letters[0] * 3)
    assert short.endswith(letters[1] * 3)
    assert f"{utf8_size(text) - 300} bytes left out" in short
    assert shorten(text, utf8_size(text)) == text
    assert utf8_size(shorten(text, 0)) < 60
