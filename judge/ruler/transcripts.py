"""What a trajectory said, as a judge reads it: conversations from its exchange events, and messages as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import msgspec

from judge.ruler.conversations import Conversation, Message, conversations, text_of
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker, HistoryGoneError

_LARGE = 500_000
"""Bytes of requests and replies that are read in a thread: JSON of this size takes some milliseconds."""


@dataclass(frozen=True)
class Transcript:
    """One trajectory, readable."""

    trajectory: str
    messages: tuple[Message, ...]
    """The conversation of the trajectory's last call, its reply included."""
    tools: tuple[dict[str, Any], ...] = ()
    conversations: tuple[Conversation, ...] = ()
    """All that trains, in the order in which it began. Empty: `messages` is all."""

    def parts(self) -> tuple[Conversation, ...]:
        """The conversations; one at least."""
        return self.conversations or (Conversation(self.messages, self.tools),)


def from_exchanges(trajectory: str, exchanges: Sequence[ExchangeRecorded]) -> Transcript:
    """Raises `HistoryGoneError` where there is no exchange to read."""
    found, last = conversations(exchanges)
    if not found:
        raise HistoryGoneError(f"every exchange of trajectory {trajectory}")
    main = found[last]
    return Transcript(trajectory, main.messages, main.tools, found if len(found) > 1 else ())


async def load(broker: Broker, project: str, trajectory: str, at_least: int = 0) -> Transcript:
    """The trajectory's transcript from the log; `at_least`: how many exchanges it completed with, which saves a request.

    Raises `HistoryGoneError` where retention took it."""
    history = await broker.read(ExchangeRecorded, at_least=at_least, project=project, trajectory=trajectory)
    exchanges = [r.event for r in history]
    if sum(len(e.request) + len(e.response) for e in exchanges) < _LARGE:
        return from_exchanges(trajectory, exchanges)
    return await anyio.to_thread.run_sync(from_exchanges, trajectory, exchanges)


def render(messages: Sequence[Message]) -> str:
    """Messages as text: role, content, tool calls."""
    return "\n".join(render_one(m) for m in messages)


def render_one(message: Message) -> str:
    """One message as text, with everything in it that a model may have sampled."""
    parts = [text_of(message.get("content"))]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        parts.insert(0, f"(thinking) {text_of(reasoning)}")
    if refusal := message.get("refusal"):
        parts.append(f"(refuses) {text_of(refusal)}")
    calls = message.get("tool_calls")
    functions = [
        (call.get("function") or call.get("custom") or {}) if isinstance(call, dict) else {}
        for call in (calls if isinstance(calls, list) else ())
    ]
    if isinstance(legacy := message.get("function_call"), dict):
        functions.append(legacy)
    for function in functions:
        said = function.get("arguments", function.get("input")) if isinstance(function, dict) else None
        name = function.get("name", "?") if isinstance(function, dict) else "?"
        parts.append(f"(calls {name}) {text_of(said)}")
    name = f" {message['name']}" if message.get("name") else ""
    return f"[{message.get('role', '?')}{name}] " + "\n".join(p for p in parts if p)


def render_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Tools that were offered, as one line; empty where there are none."""
    return "[tools] " + msgspec.json.encode(tools).decode() if tools else ""


def size(text: str) -> int:
    """Of a text in a prompt: its bytes of UTF-8. Tokenizers take about as many tokens for a byte in every script, while a
    character of Chinese takes as many as three or four of English."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def shorten(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8: a quarter from the beginning, the rest from the end, where the outcome is."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= limit:
        return text
    mark = f"\n(… {len(whole) - limit} bytes left out …)\n"
    room = max(limit - len(mark.encode()), 0)
    head = room // 4
    tail = whole[len(whole) - (room - head) :] if room > head else b""
    return whole[:head].decode("utf-8", "ignore") + mark + tail.decode("utf-8", "ignore")
