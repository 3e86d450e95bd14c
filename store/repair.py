"""Writes the events of damaged files again, as far as the log still holds them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio.to_thread
import msgspec

from pipeline import streams
from pipeline.events import AnyEvent, wire_name
from pipeline.log.broker import Broker, HistoryGoneError, Recorded
from pipeline.telemetry.logs import get_logger
from store.catalog import Catalog, FileName

log = get_logger("store.repair")

_PAGE = 1_000
"""Sequences that are read from the log at once."""
_ROWS = 20_000
"""Events of a file that is written again."""


async def repair(broker: Broker, catalog: Catalog, damaged: list[tuple[str, FileName]]) -> int:
    """Write again what the files of `damaged` (tag, name) held and no other file holds. Returns the number of events
    written.

    An error is logged for each file of which the log no longer holds everything."""
    written = 0
    for tag, name in damaged:
        rows: list[Recorded[AnyEvent]] = []
        first = name.first
        state = (await broker.stream_info(name.stream)).state
        while first <= name.last:
            last = min(first + _PAGE - 1, name.last)
            found = [r async for r in _events(broker, name.stream, first, last)]
            rows += [r for r in found if wire_name(r.event) == tag]
            first = last + 1
        known = catalog.already(name.stream, [(r.seq, r.place.at) for r in rows])
        missing = [r for r in rows if (r.seq, r.place.at) not in known]
        for i in range(0, len(missing), _ROWS):
            await anyio.to_thread.run_sync(_write, catalog, tag, missing[i : i + _ROWS])
        written += len(missing)
        if state.first_seq > name.first or state.last_seq < name.last:
            log.error(
                "events lost with a damaged file",
                file=str(name),
                detail=f"{name.stream} holds sequences {state.first_seq} to {state.last_seq} only: restore the file "
                "from a backup",
            )
        log.info("damaged file repaired from the log", tag=tag, file=str(name), events=len(missing))
    return written


async def _events(broker: Broker, stream: str, first: int, last: int) -> AsyncIterator[Recorded[AnyEvent]]:
    async for message in broker.messages(stream, first, last):
        try:
            event = await broker.decode(message.payload)
        except (msgspec.DecodeError, HistoryGoneError):
            continue  # it is among the dead letters
        yield Recorded(event, stream, message.seq, message.subject, message.headers)


def _write(catalog: Catalog, tag: str, rows: list[Recorded[AnyEvent]]) -> None:
    seqs, ats = [r.seq for r in rows], [r.place.at for r in rows]
    catalog.write(tag, [r.event for r in rows], seqs, ats, [r.headers.get("traceparent", "") for r in rows])
    catalog.add(streams.stream_of_subject(tag), seqs)
