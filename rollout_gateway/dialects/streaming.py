"""A streamed reply: cleaned for the client as it passes, and put together again for the log.

From the chunk on that carries the last finish reason, chunks are held back until the exchange is on the log: a client
that acts on the end of a reply can rely on its being recorded.

Nearly every chunk of a chat is one more piece of content and has one shape. Such a chunk is recognised as a whole by a
pattern, cut where the gateway's own fields are, and its values are kept as they came; they are read all at once at the
end. Whatever else comes is decoded (`_decoded`), and both ways lead to the same record. Where the transfer's own framing
is as regular, one piece a chunk, a piece is taken with its frame (`cut`), and neither side's HTTP needs to look at it.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field

import msgspec

from pipeline.events import now_us
from rollout_gateway.dialects import calls as wire
from rollout_gateway.dialects.calls import Answer, Call, Fields, Raw, SampledChoice
from rollout_gateway.dialects.endpoints import CHAT, Dialect, choices_decoder

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
_NULL = Raw(b"null")

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_EVENT = (
    rb'data: (\{"id":"[^"\\]*","object":"chat\.completion\.chunk","created":\d+,"model":"[^"\\]*",'
    rb'"choices":\[\{"index":0,"delta":\{"content":(' + _STRING + rb')\},"logprobs":)'
    rb'\{"content":\[\{"token":' + _STRING + rb',"logprob":(-?[0-9.eE+-]+),"bytes":(?:\[[0-9,]*\]|null),'
    rb'"top_logprobs":\[\]\}\]\}'
    rb',"finish_reason":null,"token_ids":\[(\d+)\]\}\]\}'
)
_PIECE = re.compile(_EVENT, re.DOTALL)
"""A chunk of one token of the only choice. Groups: up to the logprobs, the content in it, the logprob, the token. Not more
than vLLM's own order of fields: another server's chunks are decoded."""
_FRAMED = re.compile(rb"([0-9a-f]{1,8})\r\n" + _EVENT + rb"\n\n\r\n", re.DOTALL)
"""The same as a chunk of HTTP's chunked coding. Groups: the size first, then as above."""
_TAIL = b'null,"finish_reason":null}]}\n\n'
_BESIDE = len(b"data: ") + len(_TAIL)


class StreamError(msgspec.Struct):
    """The error of an event that ends a stream."""

    message: str = ""
    code: int = 500


_error_decoder = msgspec.json.Decoder(StreamError, strict=False)


@dataclass(eq=False)
class _Choice:
    """What has come of one choice."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    kept_logprobs: list[Raw] = field(default_factory=list)
    pieces: list[Raw] = field(default_factory=list)
    prompt_ids: bytes = b""
    echoed: bool = False
    """The prompt, where the client asked for it, has been put before the first piece."""
    finish: Fields | None = None


class StreamCapture:
    """Takes one reply, in whatever portions it arrives."""

    def __init__(self, dialect: Dialect, call: Call) -> None:
        self._dialect, self._asked, self._expected = dialect, call.params, call.choices
        self._echo = call.echo
        self._buffer = b""
        self._prompt_ids = b""
        self._top: Fields = {}
        self._usage: Raw | None = None
        self._choices: dict[int, _Choice] = {}
        self._finished = 0
        self._held: list[bytes] = []
        self.ended = False
        """The end mark has come."""
        self.error: StreamError | None = None
        """The server gave up in mid-stream, and said so."""
        self.first_token_at = 0
        self._plain = (
            dialect is CHAT
            and call.choices == 1
            and not call.params.wants_logprobs
            and not call.params.return_token_ids
        )
        """Whether a chunk may be cut rather than decoded: the client sees neither ids nor logprobs."""
        self._cut: list[tuple[bytes, ...]] = []
        """Content, logprob and token of what was cut and not read yet, as they came."""

    @property
    def server_failed(self) -> bool:
        """The server said that it is at fault, as one does that is about to die."""
        return self.error is not None and self.error.code >= 500

    @property
    def held(self) -> bytes:
        """What the client is to see once the exchange is on the log."""
        return b"".join(self._held)

    def take(self, data: bytes) -> bytes:
        """Note what arrived; give what the client is to see of it now.

        Raises `msgspec.DecodeError` where it is no chunk."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        out: list[bytes] = []
        start = 0
        while not self.ended:
            end = data.find(b"\n\n", start)
            if end < 0:
                self._buffer = data[start:]
                break
            self._take_event(data, start, end, out)
            start = end + 2
        return out[0] if len(out) == 1 else b"".join(out)

    def cut(self, data: bytes) -> tuple[int, bytes]:
        """`take` for what begins with a chunk of the chunked coding, for the pieces of usual shape that come first: how
        many bytes they are, and what the client is to see of them, chunked too. The rest is to be given to `take`."""
        if not self._plain or not self._top or self._finished or self._buffer:
            return 0, b""
        out: list[bytes] = []
        at = 0
        while (piece := _FRAMED.match(data, at)) is not None:
            size, seen, content, logprob, token = piece.groups()
            end = piece.end()
            if int(size, 16) != end - at - len(size) - 4:  # not one event a chunk after all
                break
            self._cut.append((content, logprob, token))
            out.append(b"%x\r\ndata: %b%b\r\n" % (len(seen) + _BESIDE, seen, _TAIL))
            at = end
        if out and not self.first_token_at:
            self.first_token_at = now_us()
        return at, out[0] if len(out) == 1 else b"".join(out)

    def _take_event(self, data: bytes, start: int, end: int, out: list[bytes]) -> None:
        if self._plain and self._top and not self._finished:
            piece = _PIECE.fullmatch(data, start, end)
            if piece is not None:
                self._cut.append(piece.group(2, 3, 4))
                if not self.first_token_at:
                    self.first_token_at = now_us()
                out.append(b"data: %b%b" % (piece[1], _TAIL))
                return
        event = data[start:end]
        if not event.startswith(b"data:"):
            return
        payload = event[6:] if event.startswith(b"data: ") else event[5:].lstrip()
        if payload == b"[DONE]":
            self.ended = True
            return
        self._flush()
        seen = self._decoded(payload)
        if seen is not None:
            (self._held if self._finished >= self._expected else out).append(b"data: %b\n\n" % seen)

    def _flush(self) -> None:
        """Read what was cut out so far into the choice."""
        if not self._cut:
            return
        contents, logprobs, tokens = zip(*self._cut, strict=True)
        self._cut.clear()
        state = self._choices.setdefault(0, _Choice())
        state.ids += array("i", map(int, tokens)).tobytes()
        state.logprobs += array("f", map(float, logprobs)).tobytes()
        # JSON strings can be joined as they are, inside of their quotation marks.
        said = b"".join([content[1:-1] for content in contents])
        if said:
            state.pieces.append(Raw(b'{"content":"%b"}' % said))

    def _decoded(self, payload: bytes) -> bytes | None:
        """Note a chunk; give what the client is to see of it, none where it held only what the gateway asked for."""
        fields = _fields_decoder.decode(payload)
        if "choices" not in fields:
            if "error" in fields:
                self.error = _error_decoder.decode(fields["error"])
            return payload
        if not self._top:
            self._top = {
                k: v for k, v in fields.items() if k not in ("choices", "usage", *self._dialect.added)
            }
        if not self._prompt_ids and "prompt_token_ids" in fields:
            self._prompt_ids = wire.pack_ids(fields["prompt_token_ids"])
        self._dialect.clean(fields, self._asked)
        if not wire.is_null(fields.get("usage")):
            self._usage = fields["usage"]
        choices = choices_decoder.decode(fields["choices"])
        visible = [c for c in choices if self._take_choice(c)]
        if choices and not visible and "usage" not in fields:
            return None
        return _encode({**fields, "choices": visible})

    def _take_choice(self, choice: Fields) -> bool:
        """Note a chunk's choice and clean it; false where nothing is left that the client is to see."""
        index = int(bytes(choice["index"])) if "index" in choice else 0
        state = self._choices.setdefault(index, _Choice())
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        packed = wire.pack_ids(ids)
        if packed and (self._echo is None or self._echo.samples):
            if not self.first_token_at:
                self.first_token_at = now_us()
            state.ids += packed
            state.logprobs += self._dialect.logprobs(logprobs)[-len(packed) :]
        if self._asked.wants_logprobs and logprobs is not None and not wire.is_null(logprobs):
            state.kept_logprobs.append(logprobs)
        if not state.prompt_ids and "prompt_token_ids" in choice:
            state.prompt_ids = wire.pack_ids(choice["prompt_token_ids"])
        if self._echo is not None and not state.echoed:
            state.echoed = True
            choice[self._dialect.piece] = self._dialect.echoed(
                self._echo.text(index), choice.get(self._dialect.piece)
            )
        piece = choice.get(self._dialect.piece)
        empty = self._dialect.is_empty(piece)
        if not empty and piece is not None:
            state.pieces.append(piece)
        self._dialect.clean_choice(choice, self._asked)
        if not wire.is_null(choice.get("finish_reason")):
            self._finished += 1
            state.finish = {
                k: v for k, v in choice.items() if k not in (self._dialect.piece, "logprobs", "token_ids")
            }
            return True
        return not empty or self._asked.wants_logprobs or bool(self._asked.return_token_ids)

    def answer(self) -> Answer:
        """The reply as if it had not been streamed, as far as it came."""
        self._flush()
        fields = dict(self._top)
        if fields:
            fields["object"] = Raw(self._dialect.whole)
        if self._usage is not None:
            fields["usage"] = self._usage
        if self._asked.return_token_ids and self._prompt_ids:
            fields["prompt_token_ids"] = _listed(self._prompt_ids)
        return Answer(fields, self._prompt_ids, [self._sampled(i) for i in sorted(self._choices)])

    def _sampled(self, index: int) -> SampledChoice:
        state = self._choices[index]
        finish = state.finish or {"finish_reason": _NULL}
        fields: Fields = {
            "index": Raw(str(index).encode()),
            self._dialect.content: self._dialect.join(state.pieces),
            "logprobs": self._dialect.join_logprobs(state.kept_logprobs) if state.kept_logprobs else _NULL,
            **{k: v for k, v in finish.items() if k != "index"},
        }
        if self._asked.return_token_ids:
            fields["token_ids"] = _listed(bytes(state.ids))
        reason = wire.text(finish["finish_reason"])
        return SampledChoice(index, bytes(state.ids), bytes(state.logprobs), reason, fields, state.prompt_ids)


def _listed(packed: bytes) -> Raw:
    return Raw(_encode(memoryview(packed).cast("i").tolist()))
