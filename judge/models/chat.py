"""What a call of a chat model takes, returns and raises.

A judge asks a `ChatModel`, which is a `JudgeModel` (`judge.models.judge_model`), or a test's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ModelReply:
    """The text that a model returned, and what it cost."""

    text: str
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    """0 if the price is unknown."""
    latency_s: float = 0.0
    """Duration of the call, retries included, without the time it waited for its turn."""
    cut_off: bool = False
    """The reply ended at the token limit."""


class ModelError(Exception):
    """The model could not be reached or refused the request, after all retries."""


class InvalidRequestError(ModelError):
    """The provider calls the request invalid (HTTP 400 or 422)."""

    def __init__(self, why: str, said: str) -> None:
        """`said`: the provider's own message, which may hold text of a run: not for logs or events."""
        super().__init__(why)
        self.said = said


class ContextWindowError(ModelError):
    """The prompt and the tokens reserved for the reply exceed the model's context."""


def list_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` by which a model answers with a JSON object that has one list, `scores`. Each entry
    of the list is an object with all of `properties` (JSON schemas by key)."""
    schema = _object_schema({"scores": {"type": "array", "items": _object_schema(properties)}})
    return {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": schema}}


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with all of these properties and no other."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


class ChatModel(Protocol):
    """A model that answers one conversation."""

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> ModelReply:
        """Return the model's reply. `schema` is a `response_format`, or `None` for free text.

        Raises `ModelError`; its subclass `ContextWindowError` if the prompt is too long."""


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of single halves of surrogate pairs, which JSON can escape and UTF-8 can't
    hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
