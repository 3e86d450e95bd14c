"""What the translations of other APIs share.

vLLM serves these APIs too, but returns no token ids there. Translated into chat completions, their calls are captured
like any other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.calls import Call, Raw, RequestParams, is_null, read_fields
from rollout_gateway.dialects.permitted import FURTHER_SAMPLING, SENT, not_permitted
from rollout_gateway.http.request import SSE_HEADERS, HeaderList, Request

_encode = msgspec.json.Encoder().encode
_NAMED_ALIKE = ("temperature", "top_p", "seed", "parallel_tool_calls")


class Translation(ABC):
    """One call of another API, and its answer.

    An answer is a list of blocks: reasoning, text, tool calls. A whole chat completion is read like a stream with one
    chunk, so both ways give the same blocks. Only a streaming client gets the events."""

    path: ClassVar[str]
    """Where clients post the call."""
    kind: ClassVar[type[Any]]
    """Struct of the request: the fields that are translated."""
    dropped: ClassVar[frozenset[str]]
    """Fields of the API that ask nothing of a vLLM server."""
    left_out: Sequence[str] = ()
    """Types of the request's tools that the model was not shown."""
    continued: frozenset[str] = frozenset()
    """Ids of recorded chat completions that the call refers to instead of repeating what was said."""
    stored = False
    """Whether the log keeps the answer, so that later calls can refer to it."""

    def __init__(self, body: bytes) -> None:
        """Raises a 400 `ApiError` for an invalid body, and for a field of chat completions that would be taken for a
        translated one. `Permitted.check` refuses unknown fields of `call`."""
        fields, self.request = read_fields(body, self.kind)
        self.streams = bool(self.request.stream)
        known = self.dropped.union(self.kind.__struct_fields__)
        self._further = {name: raw for name, raw in fields.items() if name not in known and not is_null(raw)}
        """Fields that both APIs name alike, such as vLLM's sampling settings, and unknown ones."""
        for name in self._further.keys() & (SENT - FURTHER_SAMPLING):
            raise not_permitted(name)
        self.id = ""
        """Id of the chat completion."""
        self.head: dict[str, Any] = {}
        """The chat completion, or the first chunk of it."""
        self.usage: dict[str, Any] | None = None
        self.ended: dict[str, Any] = {}
        """The choice with the finish reason; empty until it has arrived."""
        self.blocks: list[dict[str, Any]] = []
        self.text = ""
        """The text of the open block so far."""
        self._open: tuple[str, int] | None = None
        """Kind of the open block, and its number if it is a tool call."""

    # -- the request -----------------------------------------------------------------------------------------------

    @abstractmethod
    def chat(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> dict[str, Any]:
        """Return the chat completion request. `exchanges` are those that `continued` names. Without them, the
        messages lack what the call refers to."""

    def call(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> Call:
        """Return the chat completion request as a call for the inference server."""
        chat = self.chat(exchanges)
        fields = {name: Raw(_encode(value)) for name, value in chat.items()}
        return Call(_encode(fields), fields, RequestParams(chat["model"], chat["stream"]), self.path)

    def _chat(self, messages: list[dict[str, Any]], max_tokens: int | None) -> dict[str, Any]:
        """Return a chat completion request with the fields that have the same meaning in both APIs."""
        request = self.request
        chat = {"model": request.model, "messages": messages, "stream": bool(request.stream), **self._further}
        if request.stream:
            chat["stream_options"] = {"include_usage": True}
        common = {name: getattr(request, name, None) for name in _NAMED_ALIKE} | {"max_tokens": max_tokens}
        return chat | {name: value for name, value in common.items() if value is not None}

    # -- the answer ------------------------------------------------------------------------------------------------

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Convert a whole chat completion."""
        self._read(completion, "message")
        self.close()
        return self.whole()

    def take(self, chunk: dict[str, Any]) -> bytes:
        """Convert a chunk of a streamed chat completion to events."""
        return self._read(chunk, "delta")

    def _read(self, completion: dict[str, Any], part: str) -> bytes:
        out = b""
        if not self.head:
            self.head, self.id = completion, str(completion.get("id", ""))
            out = self.begin() if self.streams else b""
        self.usage = completion.get("usage") or self.usage
        for choice in completion["choices"]:
            said = choice.get(part) or {}
            for kind in ("reasoning", "content"):
                if said.get(kind):
                    out += self._write(kind, said[kind])
            for position, call in enumerate(said.get("tool_calls") or ()):
                function = call.get("function") or {}
                names = call.get("id", ""), function.get("name", "")
                out += self._write(
                    "tool", function.get("arguments") or "", names, call.get("index", position)
                )
            if choice.get("finish_reason"):
                self.ended = choice
        return out

    def _write(self, kind: str, text: str, call: tuple[str, str] = ("", ""), number: int = 0) -> bytes:
        out = b""
        if self._open != (kind, number):
            out = self.close()
            self._open = kind, number
            out += self.open(kind, *call)
        if text:
            self.text += text
            if self.streams:
                out += self.delta(text)
        return out

    def close(self) -> bytes:
        """Complete the open block, if there is one, and return its last events."""
        if self._open is None:
            return b""
        self._open = None
        out = self.complete(self.blocks[-1])
        self.text = ""
        return out

    @abstractmethod
    def begin(self) -> bytes:
        """Return the first events."""

    @abstractmethod
    def open(self, kind: str, call_id: str, name: str) -> bytes:
        """Add an empty block of `kind`: `reasoning`, `content` or `tool`. `call_id` and `name` are those of a tool
        call. Return the block's first events if the client `streams`; otherwise nothing."""

    @abstractmethod
    def delta(self, text: str) -> bytes:
        """Return the event for a further piece of text of the open block."""

    @abstractmethod
    def complete(self, block: dict[str, Any]) -> bytes:
        """Put the collected `text` into a block that is complete. Return its last events if the client `streams`."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Convert an error in the middle of a stream to events."""

    def error(self, body: bytes, status: int) -> bytes:
        """Convert an error from OpenAI's format."""
        return body

    def event(self, kind: str, **data: Any) -> bytes:
        """Encode a server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **data}))


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
    """The content of a chat message with these parts: text where there is nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts) or None
    return parts


class StreamSink:
    """Writes a streamed answer to the client of `request`, who gets further `headers` with it."""

    def __init__(self, request: Request, headers: HeaderList = ()) -> None:
        self.request, self._headers = request, headers

    def start(self, flow: Callable[[bool], None]) -> None:
        """Begin the answer. `flow(True)` is called when the client is too slow, `flow(False)` when it can take more."""
        self.request.start(200, (*SSE_HEADERS, *self._headers))
        self.request.on_flow = flow

    @property
    def write_chunks(self) -> Callable[[bytes], None] | None:
        """As `write`, for data that is in HTTP's chunked coding already. `None` if the client does not get that
        coding."""
        return self.request.write_chunks if self.request.chunked else None

    def write(self, data: bytes) -> None:
        """Write whole server-sent events."""
        self.request.write(data)

    def end(self) -> None:
        """End the answer."""
        self.request.end()


class TranslatedSink(StreamSink):
    """Writes the stream of a chat completion as the stream of another API."""

    def __init__(self, request: Request, translation: Translation, headers: HeaderList = ()) -> None:
        super().__init__(request, headers)
        self._translation = translation
        self._buffer = b""
        self._failed = False

    @property
    def write_chunks(self) -> None:
        return None  # the other API has other events

    def write(self, data: bytes) -> None:
        """Translate what has come of the stream. An incomplete event is kept until its end has come."""
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
        self.request.write(out)

    def end(self) -> None:
        """End the answer with the last events, unless it ended with an error."""
        self.request.write(b"" if self._failed else self._translation.end())
        self.request.end()
