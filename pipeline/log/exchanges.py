"""The exchanges of runs as whole exchanges, although the log holds most of them as continuations of earlier ones.

The writer (a gateway) looks for the earlier exchange of the trajectory that saves most among those it remembers;
without one it writes the exchange whole. A reader remembers what it read and continues from there. What it does not
remember it reads from the log. An exchange whose earlier exchange is gone can't be made whole: its readers get an
error or do not get it, and never a part of it.

A *form* is an exchange as the log holds it, whole or a `Continuation`; a *base* is the part of an exchange that a later
one may repeat (`pipeline.events.continuation`). Calls of a trajectory may branch, as those of sub-agents do: the *ends*
are the newest exchanges of its branches.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import aclosing

import msgspec

from pipeline.errors import HistoryGoneError
from pipeline.events import ClaimCheck, Continuation, ExchangeRecorded, decode
from pipeline.events.continuation import (
    Base,
    BrokenChainError,
    Form,
    Key,
    base_of,
    continue_from,
    find_base,
    key_of,
    restore,
)
from pipeline.log import objects
from pipeline.log.stream_reader import StreamReader
from pipeline.log.subjects import stream_of, subject_filter

_SMALL = 4096
"""Bytes of prompt and request below which an exchange is written whole and not remembered: the
comparison would cost more than the bytes."""
_MOST_ENDS = 4
"""Exchanges of a trajectory that are remembered: the ends of its branches."""


class ExchangeNotWholeError(HistoryGoneError):
    """An exchange that can't be made whole. `seq` is its number in its trajectory."""

    def __init__(self, form: Continuation, why: str) -> None:
        exchange = form.exchange
        super().__init__(
            f"exchange {exchange.seq}.{exchange.choice} of trajectory {exchange.trajectory!r}",
            f"can't be read: {why}. Runs that were recorded in the store are put back by `journeywork replay`",
        )
        self.seq = exchange.seq


class RememberedExchanges:
    """What later exchanges of the same trajectories may repeat, up to `max_bytes`; those unused longest are
    forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ends: OrderedDict[tuple[str, str], list[Base]] = OrderedDict()
        """By project and trajectory, the newest last."""
        self.bytes = 0

    def find(self, project: str, trajectory: str, key: Key) -> Base | None:
        """Return an exchange of a trajectory, or `None` if it is not remembered."""
        return next((base for base in self._ends.get((project, trajectory), ()) if base.key == key), None)

    def shortest(self, exchange: ExchangeRecorded) -> Form:
        """Return the exchange as it takes the fewest bytes: continuing a remembered one, or whole."""
        if _is_small(exchange):
            return exchange
        best: Continuation | None = None
        for base in reversed(self._ends.get((exchange.project, exchange.trajectory), ())):
            form = continue_from(base, exchange)
            if form is not None and (best is None or form.saved > best.saved):
                best = form
                if base.tokens and 4 * form.tokens == len(base.tokens):
                    break  # all its tokens are repeated: an exchange that goes further would have taken its place
        return best or exchange

    def add(self, exchange: ExchangeRecorded, form: Form) -> None:
        """Remember the whole `exchange`, which the log holds as `form`, as the newest end of its trajectory. It takes
        the place of the end that it continues. Beyond `_MOST_ENDS` the oldest end is forgotten, beyond `max_bytes` the
        trajectories unused longest."""
        if not self._max_bytes or _is_small(exchange):
            return
        name = exchange.project, exchange.trajectory
        ends = self._ends.get(name)
        if ends is None:
            ends = self._ends[name] = []
        else:
            self._ends.move_to_end(name)
        base = Base(exchange)
        # An end of which only a part of the tokens is repeated stays: this exchange begins another branch.
        continued, repeated_bytes = (base_of(form), 4 * form.tokens) if isinstance(form, Continuation) else (None, 0)
        for end in ends:
            is_continued = end.key == continued and 0 < repeated_bytes == len(end.tokens)
            if is_continued or end.key == base.key:
                ends.remove(end)
                self.bytes -= end.size
                break
        ends.append(base)
        self.bytes += base.size
        if len(ends) > _MOST_ENDS:
            self.bytes -= ends.pop(0).size
        while self.bytes > self._max_bytes:
            _, forgotten = self._ends.popitem(last=False)
            self.bytes -= sum(base.size for base in forgotten)


def _is_small(exchange: ExchangeRecorded) -> bool:
    """Return whether an exchange is written whole and not remembered (`_SMALL`)."""
    return len(exchange.prompt_ids) + len(exchange.request) < _SMALL


async def make_whole(reader: StreamReader, remembered: RememberedExchanges, form: Form) -> ExchangeRecorded:
    """Return the whole exchange of a form that was read, and remember it. Raises `ExchangeNotWholeError`."""
    if isinstance(form, ExchangeRecorded):
        remembered.add(form, form)
        return form
    exchange = form.exchange
    base = remembered.find(exchange.project, exchange.trajectory, base_of(form))
    try:
        if base is None:
            base = find_base(form, await _forms_of_trajectory(reader, exchange))
        whole = restore(base, form)
    except BrokenChainError as error:
        raise ExchangeNotWholeError(form, str(error)) from error
    remembered.add(whole, form)
    return whole


async def _forms_of_trajectory(reader: StreamReader, exchange: ExchangeRecorded) -> dict[Key, Form]:
    """Return the exchanges of a trajectory as the log holds them; those that can't be decoded are left out."""
    subject = subject_filter(ExchangeRecorded, project=exchange.project, trajectory=exchange.trajectory)
    forms: dict[Key, Form] = {}
    async with aclosing(reader.messages(stream_of(ExchangeRecorded), subject=subject)) as messages:
        async for message in messages:
            try:
                form = decode(message.payload)
                if isinstance(form, ClaimCheck):
                    form = decode(await objects.get(reader, form.bucket, form.object))
            except (msgspec.DecodeError, HistoryGoneError):
                continue  # what continues it can't be made whole
            if isinstance(form, ExchangeRecorded):
                forms[key_of(form)] = form
            elif isinstance(form, Continuation):
                forms.setdefault(key_of(form), form)  # a whole one was put back from the store
    return forms
