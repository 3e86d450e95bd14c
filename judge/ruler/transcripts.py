"""A trajectory as a judge reads it: conversations from its exchange events, and messages as text.

An exchange is a recorded call. A conversation is a chain of calls in which each one's messages begin with those of the
call before (`pipeline.chat.conversations`); a trajectory has several if there were sub-agents, or its history was
shortened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.chat.conversations import Conversation, Message, build_conversations, text_of
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker, HistoryGoneError


@dataclass(frozen=True)
class Transcript:
    """One trajectory."""

    trajectory: str
    conversations: tuple[Conversation, ...]
    """Everything that trains, in the order in which it began; at least one."""
    last: int = -1
    """Index of the conversation of the trajectory's last call."""

    @property
    def last_conversation(self) -> Conversation:
        """The conversation of the trajectory's last call."""
        return self.conversations[self.last]


def from_exchanges(trajectory: str, exchanges: Sequence[ExchangeRecorded]) -> Transcript:
    """Build the transcript of a trajectory. Raises `HistoryGoneError` if there is no exchange."""
    conversations, last = build_conversations(exchanges)
    if not conversations:
        raise HistoryGoneError(
            f"trajectory {trajectory}",
            "has no recorded call to judge: its run sent none through the gateway, or the log no longer holds them "
            "(then raise the stream's retention or replay from the store)",
        )
    return Transcript(trajectory, conversations, last)


async def load_transcript(broker: Broker, project: str, trajectory: str, at_least: int = 0) -> Transcript:
    """Read a trajectory's transcript from the log. `at_least`: how many exchanges were recorded; knowing it saves a
    request. Raises `HistoryGoneError` if fewer can be read."""
    history = await broker.read(ExchangeRecorded, at_least=at_least, project=project, trajectory=trajectory)
    exchanges = [r.event for r in history]
    if (count := len({(e.seq, e.choice) for e in exchanges})) < at_least:
        raise HistoryGoneError(
            f"the whole history of trajectory {trajectory} ({count} of {at_least} exchanges can be read)"
        )
    return from_exchanges(trajectory, exchanges)


def indented(text: str) -> str:
    """Return a text whose further lines begin with a space: it can't look like the beginning of a message or a call."""
    return "\n ".join(text.splitlines())


def render_message(message: Message) -> str:
    """Return a message as text, with everything in it that a model may have sampled. Only the role and the words
    (thinking), (refuses) and (calls NAME) begin lines; all further lines of the message's own text begin with a space.
    Otherwise a reply could contain lines that look like tool results and calls of other messages."""
    name = f" {message['name']}" if message.get("name") else ""
    text = indented(f"[{message.get('role', '?')}{name}]")
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        text += f"\n(thinking) {indented(text_of(reasoning))}"
    if content := text_of(message.get("content")):
        text += ("\n " if reasoning else " ") + indented(content)
    if refusal := message.get("refusal"):
        text += f"\n(refuses) {indented(text_of(refusal))}"
    calls = message.get("tool_calls")
    functions: list[Any] = [
        (c.get("function") or c.get("custom")) if isinstance(c, dict) else None
        for c in (calls if isinstance(calls, list) else ())
    ]
    if isinstance(message.get("function_call"), dict):
        functions.append(message["function_call"])
    for function in functions:
        called = function if isinstance(function, dict) else {}
        arguments = text_of(called.get("arguments", called.get("input")))
        text += "\n" + indented(f"(calls {called.get('name', '?')}) {arguments}")
    return text


def render_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Return the tools that were offered as one line, or an empty string if there are none."""
    return "[tools] " + msgspec.json.encode(tools).decode() if tools else ""


def utf8_size(text: str) -> int:
    """Return the bytes of UTF-8 that a text takes in a prompt. Tokenizers take about as many tokens for a byte in
    every script."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def shorten(text: str, limit: int) -> str:
    """Return a text cut to `limit` bytes of UTF-8: a quarter of that from its beginning, the rest from its end, where
    the outcome of a run is."""
    whole = text.encode("utf-8", "replace")
    if len(whole) <= limit:
        return text
    mark = f"\n(… {len(whole) - limit} bytes left out …)\n…"
    room = max(limit - len(mark.encode()), 0)
    head = room // 4
    tail = whole[len(whole) - (room - head) :] if room > head else b""
    return whole[:head].decode("utf-8", "ignore") + mark + tail.decode("utf-8", "ignore")
