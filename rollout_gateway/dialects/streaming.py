"""A streamed reply: cleaned for the client as it passes, and assembled for the log.

The chunk with the last finish reason and all chunks after it are held back until the exchange is on the log. So a
client that acts on the end of a reply can rely on its record.

Nearly every chunk of a chat completion holds one more token's text and has the same shape. A pattern matches such a
chunk as a whole. The gateway's own fields are cut out, and the values are kept as JSON and decoded together at the
end. Any other chunk is decoded (`_decode`). Both ways lead to the same record."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.events import now_us
from rollout_gateway.dialects.call_ids import CallIds, FunctionDelta, ToolDelta
from rollout_gateway.dialects.calls import Answer, Call, Fields, Raw, SampledChoice, decode_text, is_null, pack_ids
from rollout_gateway.dialects.endpoints import ADDED, check_values, choices_decoder, clean, clean_choice, pack_logprobs

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
_NULL = Raw(b"null")
DONE = b"data: [DONE]\n\n"

_STRING = rb'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"'
"""A JSON string, but for escaped surrogates."""
_NUMBER = rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_EVENT = (
    rb'data: (\{"id":"[^"\\]*","object":"chat\.completion\.chunk","created":\d+,"model":"[^"\\]*",'
    rb'"choices":\[\{"index":0,"delta":\{"content":(' + _STRING + rb')\},"logprobs":)'
    rb'\{"content":\[\{"token":"[^"\\]*(?:\\.[^"\\]*)*","logprob":(' + _NUMBER + rb'),"bytes":(?:\[[0-9,]*\]|null),'
    rb'"top_logprobs":\[\]\}\]\}'
    rb',"finish_reason":null,"token_ids":\[(\d{1,9})\]\}\]\}'
)
_PIECE = re.compile(_EVENT, re.DOTALL)
"""A chunk with one token of the only choice, in vLLM's order of fields. Groups: all up to the logprobs, the content,
the logprob, the token id."""
_TAIL = b'null,"finish_reason":null}]}\n\n'


@dataclass(frozen=True)
class StreamError:
    """The error in an event that ends a stream."""

    message: str
    code: int


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolDelta] | None = None


_index_decoder = msgspec.json.Decoder(int)
_delta_decoder = msgspec.json.Decoder(_Delta)
_TEXTS = ("content", "reasoning", "refusal")


@dataclass(eq=False)
class _Choice:
    """One choice, as far as it has come."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    kept_logprobs: list[Raw] = field(default_factory=list)
    deltas: list[_Delta] = field(default_factory=list)
    calls: CallIds = field(default_factory=CallIds)
    finish: Fields | None = None


class StreamCapture:
    """Reads one streamed chat completion, in portions of any size."""

    def __init__(self, call: Call) -> None:
        self._call, self._params, self._expected = call, call.params, call.choices
        self._pending: list[bytes] = []
        """The portions of an event that has not ended yet."""
        self._after_cr = False
        """What came last ended with a carriage return, to which a line feed may belong."""
        self._prompt_ids = b""
        self._top: Fields = {}
        self._usage: Raw | None = None
        self._choices: dict[int, _Choice] = {}
        self._finished = 0
        self._last_events: list[bytes] = []
        self.ended = False
        """`[DONE]` has come."""
        self.error: StreamError | None = None
        """The error by which the server ended the stream."""
        self.first_token_at = 0
        params = call.params
        self._plain = call.choices == 1 and not (params.wants_logprobs or params.return_token_ids)
        """Chunks may be taken undecoded, because the client gets neither ids nor logprobs."""
        self._undecoded: list[tuple[bytes, ...]] = []
        """JSON of content, logprob and token id of the chunks that were taken undecoded."""

    @property
    def server_failed(self) -> bool:
        """Whether the server ended the stream with an error of its own. A server that is about to die does so."""
        return self.error is not None and self.error.code >= 500

    @property
    def last_events(self) -> bytes:
        """The held-back chunks, which the client gets once the exchange is on the log."""
        return b"".join(self._last_events)

    def take(self, data: bytes) -> bytes:
        """Read what arrived. Returns what the client gets of it now. Raises `msgspec.DecodeError` for an invalid
        chunk."""
        if self._after_cr or b"\r" in data:
            data, self._after_cr = _with_line_feeds(data, self._after_cr)
        if self._pending:
            if b"\n\n" not in self._pending[-1][-1:] + data:  # neither copied nor searched again
                self._pending += [data] if data else []
                return b""
            data = b"".join([*self._pending, data])
            self._pending.clear()
        out: list[bytes] = []
        start = 0
        while not self.ended:
            end = data.find(b"\n\n", start)
            if end < 0:
                self._pending += [data[start:]] if start < len(data) else []
                break
            self._take_event(data, start, end, out)
            start = end + 2
        return out[0] if len(out) == 1 else b"".join(out)

    def _take_event(self, data: bytes, start: int, end: int, out: list[bytes]) -> None:
        if self._plain and self._top and not self._finished:
            piece = _PIECE.fullmatch(data, start, end)
            if piece is not None:
                self._undecoded.append(piece.group(2, 3, 4))
                if not self.first_token_at:
                    self.first_token_at = now_us()
                out.append(b"data: %b%b" % (piece[1], _TAIL))
                return
        payload = _payload(data[start:end])
        if payload == b"[DONE]":
            self.ended = True
        if not payload or self.ended:
            return
        self._flush()
        shown = self._decode(payload)
        if shown is not None:
            (self._last_events if self._finished >= self._expected else out).append(b"data: %b\n\n" % shown)

    def _flush(self) -> None:
        """Decode the values that were taken undecoded."""
        if not self._undecoded:
            return
        contents, logprobs, tokens = zip(*self._undecoded, strict=True)
        self._undecoded.clear()
        state = self._choices.setdefault(0, _Choice())
        # What is between the quotation marks of JSON strings can be joined without decoding it.
        joined = b"".join([content[1:-1] for content in contents])
        if joined:
            valid = joined.decode(errors="replace").encode()
            state.deltas.append(_delta_decoder.decode(b'{"content":"%b"}' % valid))
        state.ids += array("i", map(int, tokens)).tobytes()
        state.logprobs += array("f", map(float, logprobs)).tobytes()

    def _decode(self, payload: bytes) -> bytes | None:
        """Read a chunk. Returns what the client gets of it, or `None` if it held only what the gateway asked for."""
        fields = _fields_decoder.decode(payload)
        check_values(fields)
        if not is_null(fields.get("error")):
            return self._take_error(msgspec.json.decode(fields["error"]))
        if "choices" not in fields:
            return _encode(fields)
        if not self._top:
            self._top = {k: v for k, v in fields.items() if k not in ("choices", "usage", *ADDED)}
        if not self._prompt_ids and "prompt_token_ids" in fields:
            self._prompt_ids = pack_ids(fields["prompt_token_ids"])
        clean(fields, self._params)
        if not is_null(fields.get("usage")):
            self._usage = fields["usage"]
        choices = choices_decoder.decode(fields["choices"])
        visible = [c for c in choices if self._take_choice(c)]
        if choices and not visible and is_null(fields.get("usage")):
            return None
        return _encode({**fields, "choices": visible})

    def _take_error(self, error: Any) -> bytes:
        """Read the error that ends the stream. Returns the event for the client."""
        error = error if isinstance(error, dict) else {"message": str(error)}
        code = error.get("code")
        self.error = StreamError(str(error.get("message")), code if isinstance(code, int) else 500)
        return _encode({"error": error})

    def _take_choice(self, choice: Fields) -> bool:
        """Read a chunk's choice and clean it. Returns whether anything is left for the client. Raises
        `msgspec.DecodeError`."""
        index = _index_decoder.decode(choice["index"]) if "index" in choice else 0
        if not 0 <= index < self._expected:
            raise msgspec.ValidationError(f"a choice has the index {index} where {self._expected} were asked for")
        state = self._choices.setdefault(index, _Choice())
        piece = choice.get("delta", _NULL)
        empty = bytes(piece) in (b"null", b"{}")
        if not empty:
            # Before the tokens: if the delta is invalid, the record holds neither its text nor its tokens.
            choice["delta"] = self._take_delta(piece, state)
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        packed, packed_logprobs = pack_ids(ids), pack_logprobs(logprobs)
        if packed:
            if not self.first_token_at:
                self.first_token_at = now_us()
            state.ids += packed
            state.logprobs += packed_logprobs[-len(packed) :]
        clean_choice(choice, self._params)
        check_values(choice)
        if self._params.wants_logprobs and logprobs is not None and not is_null(logprobs):
            state.kept_logprobs.append(logprobs)
        if not is_null(choice.get("finish_reason")):
            decode_text(choice["finish_reason"])
            self._finished += state.finish is None
            self._call.add_reference(choice, self._top.get("id"))
            state.finish = {k: v for k, v in choice.items() if k not in ("delta", "logprobs", "token_ids")}
            return True
        return not empty or self._params.wants_logprobs or bool(self._params.return_token_ids)

    def _take_delta(self, piece: Raw, state: _Choice) -> Raw:
        """Read a delta. Returns it with the positions and ids of its tool calls, and with one entry for each call.

        vLLM sends name and arguments as two entries if one chunk holds both, as chunks do under load. OpenAI's Python
        client keeps the first of them only."""
        fields, delta = msgspec.json.decode(piece), _delta_decoder.decode(piece)
        reply, calls = self._top.get("id"), delta.tool_calls or []
        mended = [state.calls.mend(call, number, reply) for number, call in enumerate(calls)]
        state.deltas.append(delta)
        if not any(mended) and len({call.index for call in calls}) == len(calls):
            return piece
        joined: dict[int | None, Any] = {}
        for said, call in zip(fields["tool_calls"], calls, strict=True):
            begun = joined.get(call.index)
            if begun is None:
                joined[call.index] = said | {"index": call.index, "id": call.id}
            else:
                begun["function"] = _join_functions(begun.get("function"), said.get("function"))
        return Raw(_encode(fields | {"tool_calls": list(joined.values())}))

    def answer(self) -> Answer:
        """Return the reply as if it had not been streamed, as far as it has come."""
        self._flush()
        fields = dict(self._top)
        if fields:
            fields["object"] = Raw(b'"chat.completion"')
        if self._usage is not None:
            fields["usage"] = self._usage
        if self._params.return_token_ids and self._prompt_ids:
            fields["prompt_token_ids"] = _listed(self._prompt_ids)
        return Answer(fields, self._prompt_ids, [self._sampled(i) for i in sorted(self._choices)])

    def _sampled(self, index: int) -> SampledChoice:
        state = self._choices[index]
        finish = state.finish or {"finish_reason": _NULL}
        fields: Fields = {
            "index": Raw(str(index).encode()),
            "message": _join_deltas(state.deltas),
            "logprobs": _join_logprobs(state.kept_logprobs) if state.kept_logprobs else _NULL,
            **{k: v for k, v in finish.items() if k != "index"},
        }
        if self._params.return_token_ids:
            fields["token_ids"] = _listed(bytes(state.ids))
        reason = decode_text(finish["finish_reason"])
        return SampledChoice(index, bytes(state.ids), bytes(state.logprobs), reason, fields)


def _listed(packed: bytes) -> Raw:
    return Raw(_encode(memoryview(packed).cast("i").tolist()))


def _join_deltas(deltas: list[_Delta]) -> Raw:
    """Join the deltas of a stream to the message of a whole choice, as vLLM writes it: `content` is `None` if there are
    tool calls and no text.

    Texts, a function's name and its arguments come in parts. The id of a tool call comes whole, in one delta or again
    in each. The calls are in the order in which they began."""
    tools: dict[int | None, dict[str, Any]] = {}
    arguments: dict[int | None, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        tool = tools.setdefault(call.index, {"id": "", "type": "function", "function": {"name": ""}})
        tool["id"] = call.id or tool["id"]
        function = call.function or FunctionDelta()
        tool["function"]["name"] += function.name or ""
        # Joined at the end: in a dictionary, `+=` copies the whole text each time.
        arguments.setdefault(call.index, []).append(function.arguments or "")
    for index, tool in tools.items():
        tool["function"]["arguments"] = "".join(arguments[index])
    role = next((delta.role for delta in reversed(deltas) if delta.role), "assistant")
    texts = {name: "".join([getattr(delta, name) or "" for delta in deltas]) for name in _TEXTS}
    content = texts.pop("content")
    message: dict[str, Any] = {"role": role, "content": content if content or not tools else None}
    message |= {name: text for name, text in texts.items() if text}
    if tools:
        message["tool_calls"] = list(tools.values())
    return Raw(_encode(message))


def _join_functions(*parts: dict[str, Any] | None) -> dict[str, Any]:
    """Join the parts that one chunk holds of a function's name and arguments."""
    told = [part for part in parts if part]
    texts = {name: [part[name] for part in told if part.get(name) is not None] for name in ("name", "arguments")}
    return {**(told[0] if told else {}), **{name: "".join(text) for name, text in texts.items() if text}}


def _with_line_feeds(data: bytes, after_cr: bool) -> tuple[bytes, bool]:
    """Return `data` with a line feed at the end of each line, and whether it ends with a carriage return. `after_cr`:
    whether the data before it did."""
    data = data[1:] if after_cr and data.startswith(b"\n") else data
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), data.endswith(b"\r")


def _payload(event: bytes) -> bytes:
    """Return the data of a server-sent event without its other fields and comments, on one line, since it is JSON."""
    lines = event.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return b" ".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])


def _join_logprobs(parts: list[Raw]) -> Raw:
    content = [entry for raw in parts for entry in msgspec.json.decode(raw).get("content") or ()]
    return Raw(_encode({"content": content}))


def replay(answer: Fields) -> bytes:
    """Convert a recorded chat completion to a stream, for a streaming client's retry."""
    top = {k: v for k, v in answer.items() if k not in ("choices", "usage")}
    top["object"] = Raw(b'"chat.completion.chunk"')
    chunks: list[Any] = []
    for choice in choices_decoder.decode(answer["choices"]):
        message = msgspec.json.decode(choice.pop("message"))
        for position, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = position
        chunks.append({**top, "choices": [{**choice, "delta": message}]})
    if "usage" in answer:
        chunks.append({**top, "choices": [], "usage": answer["usage"]})
    return b"".join(b"data: %b\n\n" % _encode(chunk) for chunk in chunks) + DONE
