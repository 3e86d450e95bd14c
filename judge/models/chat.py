"""What a call of a chat model takes, returns and raises, whichever client makes it."""

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
    """The model could not be reached or refused the request, after all retries and fallbacks."""


class InvalidRequestError(ModelError):
    """The provider calls the request invalid (HTTP 400)."""


class ContextWindowError(ModelError):
    """The prompt and the tokens reserved for the reply exceed the model's context."""


def list_schema(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` of an object with one list, `name`, whose entries have all of `properties` (JSON
    schemas by key)."""
    entry = _object_schema(properties)
    schema = _object_schema({name: {"type": "array", "items": entry}})
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    fixed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **fixed}


class ChatModel(Protocol):
    """A model that answers one conversation."""

    async def __call__(self, messages: Messages, schema: dict[str, Any] | None) -> ModelReply:
        """Return the model's reply. `schema` is a `response_format`, or `None` for free text.

        Raises `ModelError`; its subclass `ContextWindowError` if the prompt is too long."""


class Client(Protocol):
    """Sends requests to one provider."""

    async def send(self, messages: Messages, parameters: dict[str, Any]) -> ModelReply:
        """Make one call with these OpenAI parameters, after those of the settings.

        Raises `ModelError`, `InvalidRequestError` or `ContextWindowError`."""

    async def aclose(self) -> None:
        """Close the connections."""


def make_reply(response: Any, model: str, latency_s: float, cost_usd: float = 0.0) -> ModelReply:
    """Convert a response with the attributes of OpenAI's `ChatCompletion`. `model` stands in for a missing name."""
    usage = getattr(response, "usage", None)
    choice = response.choices[0] if getattr(response, "choices", None) else None
    return ModelReply(
        text=getattr(getattr(choice, "message", None), "content", None) or "",
        model=str(getattr(response, "model", None) or model),
        prompt_tokens=int(getattr(usage, "prompt_tokens", None) or 0),
        completion_tokens=int(getattr(usage, "completion_tokens", None) or 0),
        cost_usd=cost_usd,
        latency_s=latency_s,
        cut_off=getattr(choice, "finish_reason", None) == "length",
    )
