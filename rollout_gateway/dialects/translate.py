"""What the translators of other APIs have in common. vLLM serves these APIs too, but gives no token ids there; as chat
completions their calls are captured like any other."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from rollout_gateway.dialects import calls as wire
from rollout_gateway.http.errors import ApiError, invalid_json

_T = TypeVar("_T")


class Translation(Protocol):
    """One call, translated: made from the client's body, asked for the chat completion, then given its answer."""

    path: ClassVar[str]
    """Where the client posted it."""

    def chat(self) -> dict[str, Any]:
        """The chat completion request."""

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """A whole completion, as the client's API has it."""

    def begin(self) -> bytes:
        """The first events of a stream."""

    def take(self, chunk: dict[str, Any]) -> bytes:
        """The events that a chunk becomes."""

    def end(self) -> bytes:
        """The last events of a stream."""

    def error(self, body: bytes, status: int) -> bytes:
        """An error in OpenAI's format, as the client's API has it."""

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """The same in mid-stream."""


def read(body: bytes, kind: type[_T]) -> _T:
    """Raises a 400 `ApiError` on what is no such request."""
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The body is not a valid request: {error}.", code="invalid_body") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_json(str(error)) from error


PASSED = (
    "seed",
    "logit_bias",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""Sampling settings that neither API has and vLLM takes: kept where a client sends them as extra fields."""


def passed(body: bytes) -> dict[str, Any]:
    """The extra sampling settings of a body that `read` has read."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: fields[name] for name in PASSED if name in fields}


def parsed_arguments(text: str) -> Any:
    """A tool call's arguments; what is no JSON object (a small model's slip) is kept under one name."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {"_raw": text}
    return value if isinstance(value, dict) else {"_raw": value}


class TranslatedStream:
    """A chat completion's stream as the stream of another API: `begin`, what `take` makes of each piece, `end`."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._buffer = bytearray()
        self._failed = False

    def begin(self) -> bytes:
        return self._translation.begin()

    def take(self, data: bytes) -> bytes:
        out = bytearray()
        for payload in wire.sse_events(self._buffer, data):
            if payload == b"[DONE]":
                continue
            chunk = msgspec.json.decode(payload)
            if "error" in chunk:
                self._failed = True
                out += self._translation.stream_error(chunk["error"])
            else:
                out += self._translation.take(chunk)
        return bytes(out)

    def end(self) -> bytes:
        return b"" if self._failed else self._translation.end()


def sse(event: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(data))
