"""One event as it is stored."""

from __future__ import annotations

from typing import Any

from pipeline.events import schema
from store.reading.sql import table_name
from store.showing.pages.errors import PageError
from store.showing.pages.history import History
from store.showing.pages.lists import Query, as_step


def event(history: History, name: str, query: Query) -> dict[str, Any]:
    """The event `<tag>/<sequence>`, such as `group.scored/17`. A stream that was made again has used a sequence twice,
    so there may be several."""
    tag, _, number = name.rpartition("/")
    sequence = as_step(number)
    if tag not in schema.tables() or sequence is None:
        raise PageError(404, f"{name[:80]!r} is no event: it is written <type>/<sequence in its stream>.")
    rows = history.rows(
        f"SELECT * FROM {table_name(tag)} WHERE log_seq = $sequence ORDER BY log_at",  # noqa: S608 - a known table
        {"sequence": sequence},
    )
    if not rows:
        raise PageError(404, f"There is no event {tag} with sequence {sequence} in this history.")
    return {"tag": tag, "sequence": sequence, "events": rows}
