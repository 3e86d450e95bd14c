"""An exchange on the log as what follows an earlier exchange of its trajectory.

The calls of a run repeat its beginning: each request holds all earlier messages, each prompt all earlier tokens. A
`Continuation` takes the place of such an exchange. It names the earlier exchange, says how much of it is repeated, and
holds the rest. Requests are compared as bytes, so whatever a client sends comes back byte for byte. The reply that a
client adds to its next request is taken from the earlier response, where it is a long string of its JSON.

Writers and readers are in `pipeline.log.exchanges`; outside of it, every exchange is whole.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pipeline.events.rollout import ExchangeRecorded
from pipeline.events.types import Micros

_SAID = re.compile(
    rb'"(?:content|arguments|reasoning(?:_content)?|text)" ?: ?"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL
)
"""A string of a response that clients send back in their next request."""
_LEAST_PIECE = 64
"""Bytes of such a string that are worth to be looked for."""
_CHECKED = 256
"""Bytes at the end of each part of an exchange that its check covers. An exchange is identified by its `at`; the check
finds one that was changed on its way, such as text that is no UTF-8 in Parquet."""
_LEAST_SAVED = 512
"""Bytes that a continuation must save. Below it the exchange is written whole, which needs no earlier one."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part of an earlier response."""

    at: int
    """Byte of the held middle of the request before which it is inserted."""
    start: int
    """Its first byte in the response."""
    length: int


class Continuation(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="continuation"):
    """Takes the place of a `rollout.exchange` whose prompt and request begin as those of an earlier exchange of its
    trajectory. Readers get the whole exchange."""

    exchange: ExchangeRecorded
    """The exchange, with the rest of `prompt_ids` and the middle of `request` only."""
    seq: int
    """`seq` of the earlier exchange."""
    choice: int = 0
    """`choice` of the earlier exchange."""
    at: Micros
    """`at` of the earlier exchange, which tells it from another one with its number, written after a power cut."""
    check: int
    """Check of the earlier exchange: a CRC-32 of the lengths and ends of its tokens, request and response."""
    tokens: int
    """How many of the first tokens of the earlier exchange, prompt and reply, begin `prompt_ids`."""
    request_head: int
    """How many of the first bytes of the earlier request begin `request`."""
    request_tail: int
    """How many of its last bytes end `request`."""
    pieces: tuple[Piece, ...] = ()
    """Parts of the earlier `response` that are inserted into the middle of `request`, in this order."""


class Key(NamedTuple):
    """What identifies an exchange of a trajectory."""

    seq: int
    choice: int
    at: int


Form = ExchangeRecorded | Continuation
"""An exchange as the log holds it."""


class Base:
    """The part of an exchange that later ones may repeat."""

    def __init__(self, exchange: ExchangeRecorded) -> None:
        self.key = Key(exchange.seq, exchange.choice, exchange.at)
        self.tokens = bytes(exchange.prompt_ids) + bytes(exchange.sampled_ids)
        self.request = bytes(exchange.request)
        self.response = bytes(exchange.response)

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.tokens) + len(self.request) + len(self.response)

    @property
    def check(self) -> int:
        """The `check` of a continuation of this exchange."""
        tokens, request, response = self.tokens, self.request, self.response
        lengths = b"%d %d %d" % (len(tokens), len(request), len(response))
        return zlib.crc32(lengths + tokens[-_CHECKED:] + request[-_CHECKED:] + response[-_CHECKED:])


class BrokenChainError(ValueError):
    """An exchange can't be made whole; the message says why."""


def continue_from(base: Base, exchange: ExchangeRecorded) -> Continuation | None:
    """Return `exchange` as a continuation of `base`, or `None` if that saves too little."""
    prompt, request = exchange.prompt_ids, exchange.request
    tokens = len(base.tokens) if prompt.startswith(base.tokens) else common_prefix(base.tokens, prompt)
    tokens -= tokens % 4
    head, tail = _common_ends(base.request, request)
    if tokens + head + tail < _LEAST_SAVED:
        return None
    middle, pieces = _without_reply(request[head : len(request) - tail], base.response)
    return Continuation(
        exchange=msgspec.structs.replace(exchange, prompt_ids=prompt[tokens:], request=middle),
        seq=base.key.seq, choice=base.key.choice, at=base.key.at, check=base.check,
        tokens=tokens // 4, request_head=head, request_tail=tail, pieces=pieces,
    )  # fmt: skip


def _common_ends(base: bytes, request: bytes) -> tuple[int, int]:
    """Return how many bytes begin both, and how many further bytes end both."""
    most = min(len(base), len(request))
    tail = common_suffix(base, request, most)
    head = len(base) - tail
    if len(base) <= len(request) and request.startswith(memoryview(base)[:head]):
        return head, tail  # something was added in between, as by every next turn
    head = common_prefix(base, request)
    return head, min(tail, most - head)


def _without_reply(middle: bytes, response: bytes) -> tuple[bytes, tuple[Piece, ...]]:
    """Return `middle` without what `response` said in it, and what has to be inserted again."""
    if len(middle) < _LEAST_PIECE:
        return middle, ()
    parts: list[bytes] = []
    pieces: list[Piece] = []
    done = length = 0
    for match in _SAID.finditer(response):
        text = match[1]
        at = middle.find(text, done) if len(text) >= _LEAST_PIECE else -1
        if at >= 0:
            parts.append(middle[done:at])
            length += at - done
            pieces.append(Piece(length, match.start(1), len(text)))
            done = at + len(text)
    return (b"".join((*parts, middle[done:])), tuple(pieces)) if pieces else (middle, ())


def restore(base: Base, form: Continuation) -> ExchangeRecorded:
    """Return the whole exchange. Raises `BrokenChainError` if `base` is not what the continuation was made from."""
    rest, size = form.exchange, len(base.request)
    if base.check != form.check:
        raise BrokenChainError(f"exchange {form.seq}.{form.choice} is not what {_name(rest)} continued")
    fits = 4 * form.tokens <= len(base.tokens) and form.request_head + form.request_tail <= size
    fits = fits and all(p.length >= 0 <= p.start <= len(base.response) - p.length for p in form.pieces)
    if not fits or min(form.tokens, form.request_head, form.request_tail) < 0:
        raise BrokenChainError(
            f"exchange {form.seq}.{form.choice} is shorter than what {_name(rest)} repeats"
        )
    request, done = [base.request[: form.request_head]], 0
    for piece in form.pieces:
        request += rest.request[done : piece.at], base.response[piece.start : piece.start + piece.length]
        done = piece.at
    request += rest.request[done:], base.request[size - form.request_tail :]
    return msgspec.structs.replace(
        rest, prompt_ids=base.tokens[: 4 * form.tokens] + rest.prompt_ids, request=b"".join(request)
    )


def base_of(form: Continuation) -> Key:
    """Return the identity of the exchange that `form` continues."""
    return Key(form.seq, form.choice, form.at)


def key_of(form: Form) -> Key:
    """Return the identity of an exchange."""
    exchange = form.exchange if isinstance(form, Continuation) else form
    return Key(exchange.seq, exchange.choice, exchange.at)


def find_base(form: Continuation, forms: Mapping[Key, Form]) -> Base:
    """Return what `form` continues, through as many continuations as lie in between. `forms` are the exchanges of the
    trajectory. Raises `BrokenChainError` if one of them is missing."""
    chain: list[Form] = [form]
    while isinstance(last := chain[-1], Continuation):
        earlier = forms.get(base_of(last))
        if earlier is None or len(chain) > len(forms) + 1:
            raise BrokenChainError(
                f"exchange {last.seq}.{last.choice}, which {_name(last.exchange)} continues, is no longer in the log"
            )
        chain.append(earlier)
    base = Base(last)
    for later in reversed(chain[1:-1]):
        assert isinstance(later, Continuation)
        base = Base(restore(base, later))
    return base


def _name(exchange: ExchangeRecorded) -> str:
    return f"exchange {exchange.seq}.{exchange.choice} of trajectory {exchange.trajectory!r}"


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length of the longest common beginning. Compares slices, as a loop over bytes takes a thousand times
    as long."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    known, step = 0, 64
    while a[known : known + step] == b[known : known + step]:
        known += step
        step *= 2
    wrong = min(known + step, most)
    while wrong - known > 1:
        middle = (known + wrong) // 2
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            wrong = middle
    return known


def common_suffix(a: bytes, b: bytes, most: int) -> int:
    """Return the length of the longest common end, `most` at most."""
    known, step = 0, 64
    while known < most:
        step = min(step, most - known)
        if a[len(a) - known - step : len(a) - known] != b[len(b) - known - step : len(b) - known]:
            break
        known += step
        step *= 2
    wrong = min(known + step, most + 1)
    while wrong - known > 1:
        middle = (known + wrong) // 2
        if a[len(a) - middle : len(a) - known] == b[len(b) - middle : len(b) - known]:
            known = middle
        else:
            wrong = middle
    return known
