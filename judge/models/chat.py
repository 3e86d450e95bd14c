"""What a call of a chat model takes, returns and raises, whichever client makes it.

A judge asks a `ChatModel`, which is a `JudgeModel` (`judge.models.judge_model`), or a test's own. That one makes the
calls through a `Client`: OpenAI's client or litellm. What a server answers is not trusted: any JSON becomes a
`ModelReply`, at worst one without text, which the judge then can't read and asks for again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.chat.conversations import text_of
from pipeline.errors import without_sent

Messages = list[dict[str, Any]]
_MAX_NAME = 200
"""Characters of a model's name that are kept."""
_MAX_TOKENS = 1 << 40
"""A larger count of tokens is none."""


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
    """The provider calls the request invalid (HTTP 400)."""

    def __init__(self, why: str, said: str) -> None:
        """`said`: the provider's own message, which may hold text of a run: not for logs or events."""
        super().__init__(why)
        self.said = said


class ContextWindowError(ModelError):
    """The prompt and the tokens reserved for the reply exceed the model's context."""


def list_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the `response_format` of an object with one list, `scores`, whose entries have all of `properties` (JSON
    schemas by key)."""
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


class Client(Protocol):
    """Sends requests to one provider."""

    async def send(self, messages: Messages, parameters: dict[str, Any]) -> ModelReply:
        """Make one call with these OpenAI parameters, after those of the settings.

        Raises `ModelError`, `InvalidRequestError` or `ContextWindowError`."""

    async def aclose(self) -> None:
        """Close the connections."""


def make_reply(body: Any, model: str, latency_s: float, cost_usd: float = 0.0) -> ModelReply:
    """Convert the JSON value of a response in OpenAI's format. `model` stands in for a missing name.

    A body of another form is a reply without text. A count that is no number of tokens is 0."""
    body = _object(body)
    usage, choices = _object(body.get("usage")), body.get("choices")
    choice = _object(choices[0] if isinstance(choices, list) and choices else None)
    name = body.get("model")
    return ModelReply(
        text=_text(_object(choice.get("message")).get("content")),
        model=well_formed(name)[:_MAX_NAME] if isinstance(name, str) and name else model,
        prompt_tokens=_tokens(usage.get("prompt_tokens")),
        completion_tokens=_tokens(usage.get("completion_tokens")),
        cost_usd=cost_usd if 0 <= cost_usd < math.inf else 0.0,
        latency_s=latency_s,
        cut_off=choice.get("finish_reason") == "length",
    )


def describe(error: Exception, messages: Messages) -> str:
    """Return an error's class and message, for logs and events, without texts of runs."""
    said = without_sent(str(error)[:500], "".join(text_of(m.get("content")) for m in messages))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def well_formed(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can escape and UTF-8 can't hold, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object, an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def _text(content: Any) -> str:
    """Return the text of a message's content, which may be a list of parts; parts that are no text are left out."""
    if isinstance(content, list):
        content = "".join(t for part in content if isinstance(t := _object(part).get("text"), str))
    return well_formed(content) if isinstance(content, str) else ""


def _tokens(count: Any) -> int:
    """Return a count of tokens, 0 for what is none."""
    return count if isinstance(count, int) and 0 <= count < _MAX_TOKENS else 0
