"""What a trajectory said, as a judge reads it: messages from its exchange events, and what a group has in common.

The transcript of a trajectory is the messages of its last call and the reply to it, because agents send the whole
conversation with every call. Side calls are left out. Where an agent shortened its history, what it dropped is dropped
here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.broker import Broker, HistoryGoneError
from pipeline.events import ExchangeRecorded
from pipeline.names import subject_token

Message = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    """One trajectory, readable."""

    trajectory: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


def from_exchanges(trajectory: str, exchanges: Sequence[ExchangeRecorded]) -> Transcript:
    """Raises `HistoryGoneError` where there is no exchange to read."""
    main = [e for e in exchanges if not e.side_call and e.choice == 0] or list(exchanges)
    if not main:
        raise HistoryGoneError(f"every exchange of trajectory {trajectory}")
    last = max(main, key=lambda e: e.seq)
    request = _object(last.request)
    response = _object(last.response)
    messages = [m for m in request.get("messages") or () if isinstance(m, dict)]
    choices = response.get("choices") or ()
    if choices and isinstance(choices[0], dict) and isinstance(choices[0].get("message"), dict):
        messages.append(choices[0]["message"])
    tools = tuple(t for t in request.get("tools") or () if isinstance(t, dict))
    return Transcript(trajectory, tuple(messages), tools)


def _object(document: bytes) -> dict[str, Any]:
    """The document as an object; empty where it is none, as the reply of a call that broke off may be."""
    try:
        value = msgspec.json.decode(document)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


async def load(broker: Broker, project: str, trajectory: str) -> Transcript:
    """The trajectory's transcript from the log. Raises `HistoryGoneError` where retention took it."""
    subject = f"rollout.exchange.{subject_token(project)}.{subject_token(trajectory)}"
    history = await broker.history("ROLLOUTS", subject)
    return from_exchanges(trajectory, [r.event for r in history if isinstance(r.event, ExchangeRecorded)])


def common_prefix(transcripts: Sequence[Transcript]) -> int:
    """How many leading messages all transcripts share."""
    shortest = min((len(t.messages) for t in transcripts), default=0)
    for index in range(shortest):
        first = transcripts[0].messages[index]
        if any(t.messages[index] != first for t in transcripts[1:]):
            return index
    return shortest


def render(messages: Sequence[Message]) -> str:
    """Messages as text: role, content, tool calls."""
    return "\n".join(_render_one(m) for m in messages)


def _render_one(message: Message) -> str:
    parts = [_text(message.get("content"))]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        parts.insert(0, f"(thinking) {_text(reasoning)}")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {} if isinstance(call, dict) else {}
        parts.append(f"(calls {function.get('name', '?')}) {_text(function.get('arguments'))}")
    name = f" {message['name']}" if message.get("name") else ""
    return f"[{message.get('role', '?')}{name}] " + "\n".join(p for p in parts if p)


def _text(content: Any) -> str:
    """Content as text; parts that are no text are named, not shown."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"])
            if isinstance(part, dict) and "text" in part
            else f"({part.get('type', 'part') if isinstance(part, dict) else 'part'})"
            for part in content
        )
    return msgspec.json.encode(content).decode()


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters: a quarter from the beginning, the rest from the end, where the outcome is."""
    if len(text) <= limit:
        return text
    mark = f"\n(… {len(text) - limit} characters left out …)\n"
    room = max(limit - len(mark), 0)
    head = room // 4
    return text[:head] + mark + text[len(text) - (room - head) :]
