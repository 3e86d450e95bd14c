"""The content of spans and scores: prompts, replies, tool results, a judge's explanations, a person's metadata.

`telemetry.content` decides what leaves this installation: everything, everything with `telemetry.masks` replaced, or
nothing. The structure, token counts and scores of a trace are not content.
"""

from __future__ import annotations

import re
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
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


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


def messages(asked: Any) -> list[Json]:
    """Return chat messages (or a prompt) as the GenAI conventions' input messages."""
    if isinstance(asked, str):
        return [{"role": "user", "parts": [{"type": "text", "content": asked}]}]
    chat = asked if isinstance(asked, list) else []
    return [{"role": m.get("role", "user"), "parts": _parts(m)} for m in chat if isinstance(m, dict)]


def conversation(request: Json) -> list[Json]:
    """Return what a request says as chat messages: its messages (of a chat completion, or of Anthropic's API), the
    items of OpenAI's Responses API, or its prompt. What a message holds beyond text and tools is left as it is."""
    asked = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    items = [item for item in asked if isinstance(item, dict)] if isinstance(asked, list) else []
    said = [message for item in items for message in _as_chat(item)]
    instructions = request.get("instructions", request.get("system"))
    return [{"role": "system", "content": instructions}, *said] if instructions else said


def _as_chat(item: Json) -> list[Json]:
    """Return a chat message, a message of Anthropic's API, or an item of the Responses API as chat messages."""
    match item.get("type"):
        case "function_call" | "custom_tool_call":
            arguments = item.get("arguments", item.get("input", ""))
            return [_calling([_tool_call(item.get("call_id"), item.get("name"), arguments)])]
        case "function_call_output" | "custom_tool_call_output":
            return [_result(item.get("call_id"), item.get("output"))]
    content = item.get("content")
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    results = [
        _result(b.get("tool_use_id"), b.get("content")) for b in blocks if b.get("type") == "tool_result"
    ]
    calls = [
        _tool_call(b.get("id"), b.get("name"), b.get("input")) for b in blocks if b.get("type") == "tool_use"
    ]
    if not results and not calls:
        return [item] if "role" in item else []
    rest = [block for block in blocks if block.get("type") not in ("tool_result", "tool_use")]
    if calls:
        return [_calling(calls, rest)]
    return results + ([{**item, "content": rest}] if rest else [])


def _tool_call(call_id: Any, name: Any, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": text}}


def _calling(calls: list[Json], content: list[Json] | None = None) -> Json:
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _result(call_id: Any, content: Any) -> Json:
    return {"role": "tool", "tool_call_id": call_id or "", "content": content}


def answered_tools(request: Json) -> list[tuple[Json, Any]]:
    """Return the tool calls of the newest reply in a request, each with its result: what the agent's tools did
    between the last call and this one."""
    results: dict[str, Any] = {}
    calls: list[Json] = []
    for message in reversed(conversation(request)):
        if message.get("role") == "tool" and not calls:
            results[str(message.get("tool_call_id", ""))] = message.get("content")
        elif message.get("role") == "assistant" and isinstance(message.get("tool_calls"), list):
            # An item of the Responses API holds one call, so a reply may be several messages here.
            calls = [call for call in message["tool_calls"] if isinstance(call, dict)] + calls
        elif calls or (message.get("role") == "assistant" and not results):
            break
    return [(call, results[str(call.get("id"))]) for call in calls if str(call.get("id")) in results]
