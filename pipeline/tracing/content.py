"""The content of spans and scores: prompts, replies, a judge's explanations, a person's metadata.

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
        self.shown = config.content != "none"
        self._masks: list[re.Pattern[str]] = []
        for pattern in config.masks if config.content == "masked" else ():
            try:
                self._masks.append(re.compile(pattern))
            except re.error as error:
                raise ConfigError(f"telemetry.masks: {pattern!r} is no regular expression: {error}") from error

    def text(self, text: str) -> str:
        """Return a text with every match of a pattern replaced; empty if no content is shown."""
        if not self.shown:
            return ""
        for mask in self._masks:
            text = mask.sub(MASK, text)
        return text

    def value(self, value: Any) -> Any:
        """Return a JSON value with every string in it masked. Only for content that is shown."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value

    def json(self, value: Any) -> str:
        """Return `value` as JSON text, masked. Only for content that is shown."""
        return msgspec.json.encode(self.value(value) if self._masks else value).decode()


def document(body: bytes) -> Json:
    """Return a JSON object; empty if the bytes are none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def request_input(request: Json) -> Any:
    """Return what a call asks: its messages, its input or prompt, or the whole request."""
    return next((request[name] for name in ("messages", "input", "prompt") if name in request), request)


def reply(response: Json) -> Any:
    """Return the message or the text of a completion's choice; of any other response, the whole of it."""
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return choice.get("message") or choice.get("text") or response
