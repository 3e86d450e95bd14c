"""What the translations of other APIs into chat completions share: `messages` is Anthropic's, `responses` OpenAI's.

vLLM serves these APIs too, but returns no token ids there. Translated into chat completions, their calls are captured
like any other. `rollout_gateway.model_calls` makes a `Translation` of a body, has its `call` answered as a chat
completion, and gives the client what `answer`, or `TranslatedSink` for a stream, makes of it. An answer of these APIs
is a list of blocks (reasoning, text, tool calls); the place of a block is its index in that list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.calls import Call, Raw, RequestParams, is_null, read_fields
from rollout_gateway.dialects.permitted import FURTHER_SAMPLING, SENT, not_permitted
from rollout_gateway.http.request import Request

_NAMED_ALIKE = ("temperature", "top_p", "seed", "parallel_tool_calls")


@dataclass(eq=False, slots=True)
class _ToolCall:
    """A tool call of the answer. Name and arguments are collected until it has a block, which begins with its name."""

    id: str
    name: str = ""
    arguments: str = ""
    place: int | None = None
    """Place of its block; `None` while it has none."""


class Translation(ABC):
    """One call of another API, and its answer.

    A whole chat completion is read like a stream with one chunk, so both ways give the same blocks. Methods that return
    events return nothing unless the client `streams`."""

    path: ClassVar[str]
    """Where clients post the call."""
    kind: ClassVar[type[Any]]
    """Struct of the request: the fields that are translated."""
    dropped: ClassVar[frozenset[str]]
    """Fields of the API that ask nothing of a vLLM server, but for those that no call sends (`permitted.DROPPED`)."""
    left_out: Sequence[str] = ()
    """Types of the request's tools that the model was not shown."""
    referenced_ids: frozenset[str] = frozenset()
    """Ids of recorded chat completions that the call refers to instead of repeating what was said."""
    stored = False
    """Whether the log keeps the answer, so that later calls can refer to it."""
    instructions: Any = None
    """The call's `instructions` as the client sent them, before a promoted prompt was put in their place."""

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
        """The answer's blocks in the form of the API, which `begin_block` adds."""
        self._texts: list[list[str]] = []
        """What has come of each block's text."""
        self._text_block: tuple[str, int] | None = None
        """Kind and place of the block of reasoning or content that goes on."""
        self.open_blocks: list[int] = []
        """Places of the blocks that are not complete. Tool calls are complete when the answer is, since pieces of
        several may come by turns."""
        self._calls: dict[int, _ToolCall] = {}
        """Tool calls by their index, in the order in which they began."""
        self._waiting: deque[_ToolCall] = deque()
        """Tool calls without a block."""

    # -- the request -----------------------------------------------------------------------------------------------

    @abstractmethod
    def chat(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> dict[str, Any]:
        """Return the chat completion request. `exchanges`: the recorded calls that `referenced_ids` names, by the ids
        of their chat completions. `None` before they are looked up: the request can be checked then, but its messages
        lack what the call refers to."""

    def merge_system(self) -> bool:
        """Have the next `call` put all system texts into its first message, for a chat template that refuses later
        system messages. Returns whether that changes the call."""
        return False

    def call(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> Call:
        """Return the chat completion request as a call for the inference server. Raises a 400 `ApiError`."""
        chat = self.chat(exchanges)
        fields = {name: Raw(msgspec.json.encode(value)) for name, value in chat.items()}
        return Call(msgspec.json.encode(fields), fields, RequestParams(chat["model"], chat["stream"]), self.path)

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
        """Return the API's whole answer, made of a whole chat completion."""
        self.read_choices(completion, "message")
        self.close_blocks()
        return self.whole_answer()

    def read_choices(self, completion: dict[str, Any], part: str) -> bytes:
        """Read a whole chat completion (`part`: "message") or a chunk ("delta"). Returns the events."""
        out = b""
        if not self.head:
            self.head, self.id = completion, str(completion.get("id", ""))
            out = self.first_events() if self.streams else b""
        self.usage = completion.get("usage") or self.usage
        for choice in completion.get("choices") or ():
            message = choice.get(part) or {}
            for kind in ("reasoning", "content"):
                if message.get(kind):
                    out += self._write_text(kind, message[kind])
            for position, call in enumerate(message.get("tool_calls") or ()):
                out += self._write_call(call.get("index", position), call)
            if choice.get("finish_reason"):
                self.ended = choice
        return out

    def _write_text(self, kind: str, text: str) -> bytes:
        """Add a piece of reasoning or content to the open block of its kind, else to a new one. Returns the events."""
        out = b""
        if self._text_block is None or self._text_block[0] != kind:
            out = self._close_text() + self._begin_block(kind)
            self._text_block = kind, len(self.blocks) - 1
        return out + self._write(self._text_block[1], text)

    def _write_call(self, index: int, piece: dict[str, Any]) -> bytes:
        """Add a piece of a tool call. The call's block begins with the first piece of its arguments, as its name is
        complete then, and after the blocks of the calls that began before it. Returns the events."""
        function = piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            call = self._calls[index] = _ToolCall(piece.get("id") or "")
            self._waiting.append(call)
        if call.place is not None:
            return self._write(call.place, function.get("arguments") or "")
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""
        out = b""
        while self._waiting and self._waiting[0].arguments:
            out += self._open_call(self._waiting.popleft())
        return out

    def _open_call(self, call: _ToolCall) -> bytes:
        """Begin the block of a tool call, with the arguments that have come. Returns the events."""
        out = self._close_text() + self._begin_block("tool", call.id, call.name)
        call.place = len(self.blocks) - 1
        return out + self._write(call.place, call.arguments)

    def _begin_block(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        """Begin a block and note that it is open. Returns the events."""
        self.open_blocks.append(len(self._texts))
        self._texts.append([])
        return self.begin_block(kind, call_id, name)

    def _write(self, place: int, text: str) -> bytes:
        """Add a piece of text to the block at `place`. Returns the events."""
        self._texts[place].append(text)
        return self.text_delta(place, text) if self.streams and text else b""

    def _close_text(self) -> bytes:
        """Add no more text to the block of reasoning or content. If no other block is open, end it now; else
        `close_blocks` ends it after the tool calls before it, since clients want blocks to end in their order. Returns
        the events."""
        (_, place), self._text_block = self._text_block or ("", -1), None
        if self.open_blocks != [place]:
            return b""
        self.open_blocks.clear()
        return self.end_block(place)

    def close_blocks(self) -> bytes:
        """Complete all open blocks and return their last events."""
        out = self._close_text()
        while self._waiting:
            out += self._open_call(self._waiting.popleft())
        out += b"".join([self.end_block(place) for place in self.open_blocks])
        self.open_blocks.clear()
        return out

    def text(self, place: int) -> str:
        """The text of a block as far as it has come."""
        return "".join(self._texts[place])

    @abstractmethod
    def first_events(self) -> bytes:
        """Return the events that begin a stream."""

    @abstractmethod
    def begin_block(self, kind: str, call_id: str, name: str) -> bytes:
        """Add an empty block of `kind`: `reasoning`, `content` or `tool`. `call_id` and `name` are those of a tool
        call. Return the block's first events."""

    @abstractmethod
    def text_delta(self, place: int, text: str) -> bytes:
        """Return the event for a further piece of text of a block."""

    @abstractmethod
    def end_block(self, place: int) -> bytes:
        """Put the collected `text` into a block that is complete. Return its last events."""

    @abstractmethod
    def whole_answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def last_events(self) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Convert an error in the middle of a stream, in OpenAI's format, to events."""

    def event(self, kind: str, **data: Any) -> bytes:
        """Encode a server-sent event."""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **data}))


def parse_object(text: str) -> dict[str, Any] | None:
    """Decode a tool call's arguments; `None` if they are not a JSON object, which small models may write."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def message_content(parts: list[dict[str, Any]], between: str = "\n") -> str | list[dict[str, Any]] | None:
    """Return the content of a chat message with these parts: if all are texts, one text with `between` between them, or
    `None` if it would be empty; else the list."""
    if all(part["type"] == "text" for part in parts):
        return between.join(part["text"] for part in parts) or None
    return parts


class TranslatedSink:
    """Writes the stream of a chat completion as the stream of another API, in place of the `Request` itself."""

    def __init__(self, request: Request, translation: Translation) -> None:
        self._request, self._translation = request, translation
        self._failed = False

    async def start(self) -> None:
        """Begin the answer."""
        await self._request.start()

    def translate(self, data: bytes) -> bytes:
        """Return whole events of the chat completion's stream as events of the other API. Each has one line of data, as
        `StreamCapture` and `replay` write them. Nothing comes after an error."""
        out = b""
        for event in data.split(b"\n\n"):
            payload = event.removeprefix(b"data: ")
            if self._failed or not payload or payload == b"[DONE]":
                continue
            chunk = msgspec.json.decode(payload)
            if error := chunk.get("error"):
                self._failed = True
                out += self._translation.stream_error(error)
            else:
                out += self._translation.read_choices(chunk, "delta")
        return out

    def last_events(self) -> bytes:
        """The end of the stream; nothing if it ended with an error."""
        return b"" if self._failed else self._translation.last_events()

    async def write(self, data: bytes) -> None:
        """Write whole events, translated."""
        await self._request.write(self.translate(data))

    async def end(self) -> None:
        """Write the translation's last events and end the answer."""
        await self._request.write(self.last_events())
        await self._request.end()
