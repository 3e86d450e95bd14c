"""What the translations of other APIs share.

vLLM serves these APIs too, but returns no token ids there. Translated into chat completions, their calls are captured
like any other."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import msgspec

from rollout_gateway.dialects.calls import Call, Fields, Raw, RequestParams

_encode = msgspec.json.Encoder().encode


class Translation(Protocol):
    """One call of another API. It is created with the client's body."""

    path: ClassVar[str]
    """Where clients post the call."""

    def chat(self) -> dict[str, Any]:
        """Return the chat completion request."""

    def call(self) -> Call:
        """Return the same as a call for the inference server."""

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Convert a whole chat completion."""

    def take(self, chunk: dict[str, Any]) -> bytes:
        """Convert a chunk of a streamed chat completion to events."""

    def end(self) -> bytes:
        """Return the last events of a stream."""

    def error(self, body: bytes, status: int) -> bytes:
        """Convert an error from OpenAI's format."""

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Convert an error in the middle of a stream to events."""


SAMPLING_FIELDS = (
    "seed", "logit_bias", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip
"""vLLM's sampling settings that neither API has. Clients may send them as extra fields."""


def sampling_fields(body: bytes) -> dict[str, Any]:
    """Return the `SAMPLING_FIELDS` of a valid body."""
    fields = msgspec.json.decode(body, type=Fields)
    return {name: fields[name] for name in SAMPLING_FIELDS if name in fields}


def chat_request(request: Any, messages: list[dict[str, Any]], sampling: dict[str, Any]) -> dict[str, Any]:
    """Begin a chat completion request with what both APIs name alike."""
    chat: dict[str, Any] = {
        "model": request.model, "messages": messages, "stream": bool(request.stream), **sampling
    }  # fmt: skip
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    for name in ("temperature", "top_p", "top_k", "parallel_tool_calls"):
        if (value := getattr(request, name, None)) is not None:
            chat[name] = value
    return chat


def chat_call(chat: dict[str, Any], endpoint: str, metadata: dict[str, Any] | None = None) -> Call:
    """Make a call of a chat completion request. `metadata` is added to the recorded request only."""
    fields = {name: Raw(_encode(value)) for name, value in chat.items()}
    recorded = fields if metadata is None else {**fields, "metadata": metadata}
    return Call(_encode(recorded), fields, RequestParams(chat["model"], chat["stream"]), endpoint)


def sse(event: str, data: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(data))


class TranslatedStream:
    """Converts the stream of a chat completion to the stream of another API."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._buffer = b""
        self._failed = False

    def take(self, data: bytes) -> bytes:
        """Convert what arrived of the stream. An incomplete event is kept until its end arrives."""
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        out = b""
        for event in events:
            payload = event[5:].lstrip()
            if not event.startswith(b"data:") or payload == b"[DONE]":
                continue
            chunk = msgspec.json.decode(payload)
            if "error" in chunk:
                self._failed = True
                out += self._translation.stream_error(chunk["error"])
            else:
                out += self._translation.take(chunk)
        return out

    def end(self) -> bytes:
        """Return the last events, unless the stream ended with an error."""
        return b"" if self._failed else self._translation.end()
