"""A streamed reply: cleaned for the client as it passes, and put together again for the log.

From the chunk on that carries the last finish reason, chunks are held back until the exchange is on the log: a client
that acts on the end of a reply can rely on its being recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rollout_gateway import wire
from rollout_gateway.dialects import Dialect, choices_decoder
from rollout_gateway.wire import Answer, Call, Fields, Raw, Sampled

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
_NULL = Raw(b"null")


@dataclass(eq=False)
class _Choice:
    """What has come of one choice."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    kept_logprobs: list[Raw] = field(default_factory=list)
    pieces: list[Raw] = field(default_factory=list)
    prompt_ids: bytes = b""
    finish: Fields | None = None


class StreamCapture:
    """Takes the chunks of one reply."""

    def __init__(self, dialect: Dialect, call: Call) -> None:
        self._dialect, self._asked, self._expected = dialect, call.asked, call.choices
        self._prompt_ids = b""
        self._top: Fields = {}
        self._usage: Raw | None = None
        self._choices: dict[int, _Choice] = {}
        self._finished = 0
        self.sampled_any = False

    @property
    def finished(self) -> bool:
        """Every choice has its finish reason."""
        return self._finished >= self._expected

    def take(self, payload: bytes) -> bytes | None:
        """Note a chunk; give what the client is to see of it, none where it held only what the gateway asked for.

        Raises `msgspec.DecodeError` where it is no chunk."""
        fields = _fields_decoder.decode(payload)
        if "choices" not in fields:  # an error in mid-stream
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
        if packed:
            self.sampled_any = True
            state.ids += packed
            state.logprobs += self._dialect.logprobs(logprobs)[-len(packed) :]
        if self._asked.wants_logprobs and logprobs is not None and not wire.is_null(logprobs):
            state.kept_logprobs.append(logprobs)
        if not state.prompt_ids and "prompt_token_ids" in choice:
            state.prompt_ids = wire.pack_ids(choice["prompt_token_ids"])
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
        fields = dict(self._top)
        if fields:
            fields["object"] = Raw(self._dialect.whole)
        if self._usage is not None:
            fields["usage"] = self._usage
        if self._asked.return_token_ids and self._prompt_ids:
            fields["prompt_token_ids"] = _listed(self._prompt_ids)
        return Answer(fields, self._prompt_ids, [self._sampled(i) for i in sorted(self._choices)])

    def _sampled(self, index: int) -> Sampled:
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
        return Sampled(index, bytes(state.ids), bytes(state.logprobs), reason, fields, state.prompt_ids)


def _listed(packed: bytes) -> Raw:
    return Raw(_encode(memoryview(packed).cast("i").tolist()))
