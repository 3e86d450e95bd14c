"""The alarms of a run as rows, for those who show them."""

from __future__ import annotations

from store.alarms.table import by_name
from store.reading.history import History, Row

_PRESENT = "SELECT * FROM alarms WHERE cleared_at IS NULL ORDER BY since DESC, alarm, model, about"


def alarms_of(history: History) -> list[Row]:
    """Return the raised alarms, the newest first: the columns of the view `alarms` with `title`, `meaning` and `action`
    (what to do) of docs/alarms.md."""
    rows = []
    for row in history.rows(_PRESENT):
        alarm = by_name().get(row["alarm"])
        rows.append({
            **row, "title": alarm.title if alarm else row["alarm"], "meaning": alarm.meaning if alarm else "",
            "action": alarm.action if alarm else "",
        })  # fmt: skip
    return rows
