"""Requests and replies of calls, as they are recorded, for the pages of groups, trajectories and shadow calls. Agents
and providers wrote them, so any part may be missing or have another form."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from pipeline.chat.conversations import text_of
from store.showing.pages.history import Row
from store.showing.pages.texts import pretty


def parse_json(text: str | None) -> Any:
    """Return parsed JSON; `None` for a text that is none."""
    try:
        return msgspec.json.decode(text or "null")
    except msgspec.DecodeError:
        return None


def value_at(value: Any, *path: str | int) -> Any:
    """Return the part of parsed JSON at `path` (names and positions); `None` if there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def request_messages(request: str | None) -> list[Any]:
    """Return the messages of a recorded request; none if it has no list of them."""
    messages = value_at(parse_json(request), "messages")
    return messages if isinstance(messages, list) else []


def new_messages(before: list[Any], later: list[Any]) -> list[Any]:
    """Return the messages of `later` after the first ones that are equal to those of `before`."""
    pairs = zip(before, later, strict=False)
    return later[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def shown_message(sent: Any) -> Row:
    """Return a message of a request as pages show it: its role, its text with the names of its images, its reasoning
    and refusal (empty if there is none), and its tool calls as indented JSON (`None` if there are none)."""
    if not isinstance(sent, dict):
        sent = {"content": str(sent)}
    content, calls = sent.get("content"), sent.get("tool_calls")
    return {
        "role": str(sent.get("role", "")),
        "content": text_of(content),
        "reasoning": text_of(sent.get("reasoning") or sent.get("reasoning_content")),
        "refusal": text_of(sent.get("refusal")),
        "tool_calls": pretty(calls) if calls else None,
    }


def is_same_reply(message: Row, reply: Row) -> bool:
    """Return whether a message of a request is the reply of the call before, both as `shown_message` returns them.
    Agents may leave its reasoning out."""
    return {**reply, "reasoning": message["reasoning"] and reply["reasoning"]} == message


def task_text(request: str | None) -> str:
    """Return the text of the first message of a user in a recorded request, else of its first message."""
    messages = [shown_message(message) for message in request_messages(request)]
    return next((m["content"] for m in messages if m["role"] == "user"), messages[0]["content"] if messages else "")


def shown_reply(response: str | None, choice: int) -> Row:
    """Return the message of a choice of a recorded response, as `shown_message` does."""
    return shown_message(value_at(parse_json(response), "choices", choice, "message") or {})
