"""The content of spans and scores: prompts, replies, tool results, a judge's explanations, a person's metadata.

`telemetry.content` decides what leaves this installation: everything, everything with `telemetry.masks` replaced, or
nothing. The structure, token counts and scores of a trace are not content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.config import ConfigError, TelemetryConfig

MASK = "[masked]"
Json = dict[str, Any]


class Content:
    """Applies `telemetry.content` to texts and JSON values."""

    def __init__(self, config: TelemetryConfig) -> None:
        """Raises `ConfigError` if a pattern of `telemetry.masks` is no regular expression."""
        self.shown = config.content not in ("none", False)
        self._masks: list[re.Pattern[str]] = []
        if config.content == "masked":
            for pattern in config.masks:
                try:
                    self._masks.append(re.compile(pattern))
                except re.error as error:
                    raise ConfigError(
                        f"telemetry.masks: {pattern!r} is no regular expression: {error}"
                    ) from error

    def text(self, text: str) -> str:
        """Return a text with every match of a pattern replaced; empty if no content is shown."""
        if not self.shown:
            return ""
        for mask in self._masks:
            text = mask.sub(MASK, text)
        return text

    def value(self, value: Any) -> Any:
        """Return a JSON value with every string in it masked. Only for content that is shown."""
        if not self._masks:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value

    def json(self, value: Any) -> str:
        """Return `value` as JSON text, masked. Only for content that is shown."""
        return msgspec.json.encode(self.value(value)).decode()


def document(body: bytes) -> Json:
    """Return a JSON object; empty if the bytes are none."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def request_input(request: Json) -> Any:
    """Return what a call asks: its messages, its prompt, or the whole request."""
    return request.get("messages", request.get("prompt", request))


def reply(response: Json) -> Json:
    """Return the message of a chat completion's choice; a text completion's text as a message; empty if it has none."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if isinstance(message := choice.get("message"), dict):
        return message
    return {"role": "assistant", "content": choice["text"]} if isinstance(choice.get("text"), str) else {}


def _parts(message: Json) -> list[Json]:
    """Return the parts of a chat message, as the GenAI conventions name them."""
    content, calls = message.get("content"), message.get("tool_calls")
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id", ""), "response": content}]
    parts: list[Json] = []
    if isinstance(message.get("reasoning_content"), str):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if isinstance(content, str) and content:
        parts.append({"type": "text", "content": content})
    for part in content if isinstance(content, list) else ():
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        parts.append({"type": "text", "content": part["text"]} if is_text else part)
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") or {}
        parts.append({"type": "tool_call", "id": call.get("id", ""), **_named(function)})
    return parts


def _named(function: Json) -> Json:
    arguments = function.get("arguments", "")
    parsed = document(arguments.encode()) if isinstance(arguments, str) else arguments
    return {"name": function.get("name", ""), "arguments": parsed or arguments}


def messages(of: Any) -> list[Json]:
    """Return chat messages (or a prompt) as the GenAI conventions' input messages."""
    if isinstance(of, str):
        return [{"role": "user", "parts": [{"type": "text", "content": of}]}]
    found = of if isinstance(of, list) else []
    return [{"role": m.get("role", "user"), "parts": _parts(m)} for m in found if isinstance(m, dict)]


def answered_tools(request: Json) -> list[tuple[Json, Any]]:
    """Return the tool calls of the newest reply in a request, each with its result: what the agent's tools did
    between the last call and this one."""
    found = request.get("messages")
    chat: Sequence[Json] = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
    results: dict[str, Any] = {}
    for message in reversed(chat):
        if message.get("role") == "tool":
            results[str(message.get("tool_call_id", ""))] = message.get("content")
        elif message.get("role") == "assistant":
            calls = message.get("tool_calls")
            known = [c for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
            return [(c, results[str(c.get("id"))]) for c in known if str(c.get("id")) in results]
    return []
