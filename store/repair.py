"""Removes damaged files from their tables and writes their events again, if the log still holds them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio.to_thread
import msgspec

from pipeline import streams
from pipeline.events import AnyEvent, wire_name
from pipeline.log.broker import Broker, HistoryGoneError, Recorded
from pipeline.telemetry.logs import get_logger
from store import columns
from store.lake import Lake
from store.recovery import DamagedFile
from store.table import EventTable

log = get_logger("store.repair")

_PAGE = 1_000
"""Number of sequences that are read from the log at once."""


async def repair(broker: Broker, lake: Lake, damaged: list[DamagedFile]) -> int:
    """Replace each damaged file, in one commit, by a new file with those of its events that the log holds and no other
    file holds. Then move the damaged file aside. Return the number of events written.

    An error is logged for each file whose events the log no longer holds completely. Raises `LakeError`."""
    written = 0
    for one in damaged:
        stream = streams.stream_of_subject(one.tag)
        state = (await broker.stream_info(stream)).state
        rows: list[Recorded[AnyEvent]] = []
        first, end = max(one.first, state.first_seq), min(one.last, state.last_seq)
        while first <= end:
            last = min(first + _PAGE - 1, end)
            rows += [r async for r in _events(broker, stream, first, last) if wire_name(r.event) == one.tag]
            first = last + 1
        count = await anyio.to_thread.run_sync(_replace, lake.table(one.tag), one, rows)
        written += count
        if state.first_seq > one.first or state.last_seq < one.last:
            log.error(
                "a damaged file held events that the log no longer holds",
                file=one.name,
                detail=f"{stream} holds only sequences {state.first_seq} to {state.last_seq}: restore the file from "
                "a backup",
            )
        log.info("damaged file repaired from the log", tag=one.tag, file=one.name, events=count)
    return written


async def _events(broker: Broker, stream: str, first: int, last: int) -> AsyncIterator[Recorded[AnyEvent]]:
    async for message in broker.messages(stream, first, last):
        try:
            event = await broker.decode(message.payload)
        except (msgspec.DecodeError, HistoryGoneError):
            continue  # the writer made it a dead letter when it was delivered
        yield Recorded(event, stream, message.seq, message.subject, message.headers)


def _replace(table: EventTable, damaged: DamagedFile, rows: list[Recorded[AnyEvent]]) -> int:
    found = None
    if rows:
        traces = [r.headers.get("traceparent", "") for r in rows]
        events, seqs, ats = [r.event for r in rows], [r.seq for r in rows], [r.place.at for r in rows]
        found = columns.table(table.tag, events, seqs, ats, traces)
    count = table.replace(damaged.name, found)
    aside = table.storage.set_aside(table.tag, damaged.name)
    log.error("damaged file set aside", file=aside, why=damaged.why, first=damaged.first, last=damaged.last)
    return count
