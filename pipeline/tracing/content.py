"""The content of spans and scores: prompts, replies, a judge's explanations, a person's metadata.

`telemetry.content` decides whether it leaves this installation. The structure, token counts and scores of a trace are
not content.
"""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]


def as_json(value: Any) -> str:
    """Return a value of decoded JSON as text."""
    return msgspec.json.encode(value).decode()


def document(body: bytes) -> Json:
    """Return the JSON object in `body`; an empty one if it holds none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def request_input(request: Json) -> Any:
    """Return what a request asks the model: the value of `messages`, `input` or `prompt`, the first that it has, else
    the whole request."""
    return next((request[name] for name in ("messages", "input", "prompt") if name in request), request)


def reply(response: Json) -> Any:
    """Return what the model replied: the message or the text of the first choice, else the whole response."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return choice.get("message") or choice.get("text") or response
