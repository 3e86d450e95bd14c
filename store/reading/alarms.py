"""The alarms of a run as rows, for those who show them."""

from __future__ import annotations

from store.alarms.table import ALARMS, by_name
from store.reading.history import History, Row

_CAUSES_FIRST = {alarm.name: place for place, alarm in enumerate(ALARMS)}
_PRESENT = "SELECT * FROM alarms WHERE cleared_at IS NULL ORDER BY since DESC, alarm, model, about"


def alarms_of(history: History) -> list[Row]:
    """Return the raised alarms, causes before consequences: the columns of the view `alarms` with `title`, `meaning`
    and `action` (what to do) of docs/alarms.md."""
    rows = []
    present = history.rows(_PRESENT)
    for row in sorted(present, key=lambda row: _CAUSES_FIRST.get(row["alarm"], len(ALARMS))):
        alarm = by_name().get(row["alarm"])
        rows.append({
            **row, "title": alarm.title if alarm else row["alarm"], "meaning": alarm.meaning if alarm else "",
            "action": alarm.action if alarm else "",
        })  # fmt: skip
    return rows
