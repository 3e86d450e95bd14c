"""The view of alarms."""

from __future__ import annotations

from pipeline.events import AlarmChanged
from store.reading.views.view import View

ALARMS = View(
    "alarms",
    "One row per alarm that began. `journeywork docs` says what each means.",
    {"cleared_at": "When it ended, UTC; null while it holds."},
    """
        SELECT project, model, alarm, about, arg_max(value, log_seq) AS value, arg_max(threshold, log_seq) AS threshold,
          arg_max(detail, log_seq) AS detail, since, max("at") FILTER (state = 'cleared') AS cleared_at
        FROM policy_alarm GROUP BY project, model, alarm, about, since
        """,
    sources=(AlarmChanged,),
)
