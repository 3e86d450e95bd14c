"""An exchange on the log as what follows an earlier exchange of its trajectory.

The calls of a run repeat its beginning: each request holds all earlier messages, each prompt all earlier tokens. A
`Continuation` takes the place of such an exchange. It names the earlier exchange, says how much of it is repeated, and
holds the rest. Requests are compared as bytes, so whatever a client sends comes back byte for byte.

Writers and readers are in `pipeline.log.exchanges`; outside of it, every exchange is whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.events.rollout import ExchangeRecorded
from pipeline.events.types import Micros

_CHECKED = 256
"""Bytes at the end of each part of an exchange that its check covers. An exchange is identified by its `at`; the check
finds one that was changed on its way, such as text that is no UTF-8 in Parquet."""
_LEAST_SAVED = 512
"""Bytes that a continuation must save. Below it the exchange is written whole, which needs no earlier one."""


class Continuation(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="continuation"):
    """Replaces a `rollout.exchange` whose prompt and request begin like those of an earlier exchange of the same
    trajectory. Readers get the whole exchange."""

    exchange: ExchangeRecorded
    """The exchange, with the rest of `prompt_ids` and the middle of `request` only."""
    seq: int
    """`seq` of the earlier exchange."""
    choice: int = 0
    """`choice` of the earlier exchange."""
    at: Micros
    """`at` of the earlier exchange. It distinguishes the exchange from another one with the same number, written after
    a power cut."""
    check: int
    """Check of the earlier exchange: a CRC-32 of the lengths and ends of its tokens, request and response."""
    tokens: int
    """Number of leading tokens of the earlier exchange (prompt and reply) that precede the stored rest of
    `prompt_ids`."""
    request_head: int
    """Number of leading bytes of the earlier request that precede the stored middle of `request`."""
    request_tail: int
    """Number of trailing bytes of the earlier request that follow it."""

    @property
    def saved(self) -> int:
        """Bytes that are not repeated."""
        return 4 * self.tokens + self.request_head + self.request_tail


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
        tokens, request, response = self.tokens, self.request, exchange.response
        lengths = b"%d %d %d" % (len(tokens), len(request), len(response))
        ends = [part[-_CHECKED:] for part in (tokens, request, response)]
        self.check = zlib.crc32(lengths + b"".join(ends))
        """The `check` of a continuation of this exchange."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.tokens) + len(self.request)


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
    rest = msgspec.structs.replace(exchange, prompt_ids=prompt[tokens:], request=request[head : len(request) - tail])
    return Continuation(
        exchange=rest,
        seq=base.key.seq,
        choice=base.key.choice,
        at=base.key.at,
        check=base.check,
        tokens=tokens // 4,
        request_head=head,
        request_tail=tail,
    )


def _common_ends(base: bytes, request: bytes) -> tuple[int, int]:
    """Return how many leading bytes two requests share, and how many trailing ones, without those counted as
    leading."""
    most = min(len(base), len(request))
    tail = common_suffix(base, request, most)
    head = len(base) - tail
    if len(base) <= len(request) and request.startswith(memoryview(base)[:head]):
        return head, tail  # something was added in between, as by every next turn
    head = common_prefix(base, request)
    return head, min(tail, most - head)


def restore(base: Base, form: Continuation) -> ExchangeRecorded:
    """Return the whole exchange. Raises `BrokenChainError` if `base` is not what the continuation was made from."""
    rest, size = form.exchange, len(base.request)
    if base.check != form.check:
        raise BrokenChainError(f"exchange {form.seq}.{form.choice} is not what {_name(rest)} continued")
    fits = 4 * form.tokens <= len(base.tokens) and form.request_head + form.request_tail <= size
    if not fits or min(form.tokens, form.request_head, form.request_tail) < 0:
        raise BrokenChainError(f"exchange {form.seq}.{form.choice} is shorter than what {_name(rest)} repeats")
    request = base.request[: form.request_head] + rest.request + base.request[size - form.request_tail :]
    prompt_ids = base.tokens[: 4 * form.tokens] + rest.prompt_ids
    return msgspec.structs.replace(rest, prompt_ids=prompt_ids, request=request)


def base_of(form: Continuation) -> Key:
    """Return the identity of the exchange that `form` continues."""
    return Key(form.seq, form.choice, form.at)


def key_of(form: Form) -> Key:
    """Return the identity of an exchange."""
    exchange = form.exchange if isinstance(form, Continuation) else form
    return Key(exchange.seq, exchange.choice, exchange.at)


def find_base(form: Continuation, forms: Mapping[Key, Form]) -> Base:
    """Return the `Base` of the whole exchange that `form` continues. That may be a continuation itself, so the chain of
    continuations is followed back to a whole exchange and restored from there. `forms`: the exchanges of the trajectory
    as the log holds them. Raises `BrokenChainError` if one of the chain is missing."""
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
    """Return how errors name an exchange."""
    return f"exchange {exchange.seq}.{exchange.choice} of trajectory {exchange.trajectory!r}"


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the length of the longest common beginning of `a` and `b`."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    return int(np.argmax(np.frombuffer(a, np.uint8, most) != np.frombuffer(b, np.uint8, most)))


def common_suffix(a: bytes, b: bytes, most: int) -> int:
    """Return the length of the longest common end of `a` and `b`, `most` at most."""
    size = min(256, most)  # it is short as a rule, so longer and longer ends are compared
    while (end := a[len(a) - size :]) == (other := b[len(b) - size :]):
        if size == most:
            return most
        size = min(4 * size, most)
    return int(np.argmax(np.frombuffer(end, np.uint8)[::-1] != np.frombuffer(other, np.uint8)[::-1]))
