"""The view of alarms."""

from __future__ import annotations

from store.reading.views.view import View

ALARMS = View(
    "alarms",
    "One row per alarm that began. docs/alarms.md says what each means.",
    {
        "model": "Policy that it is about; empty for the whole run.",
        "alarm": "Name of the alarm.",
        "about": "What it is about beside the model, such as a replica, a stream or a consumer.",
        "value": "Measured value when it began; after its end, the last value for which it held.",
        "threshold": "The setting that the value was compared with.",
        "detail": "The alarm in words.",
        "since": "When it began, UTC.",
        "cleared_at": "When it ended, UTC; null while it holds.",
    },
    """
        SELECT project, model, alarm, about, arg_max(value, log_seq) AS value, arg_max(threshold, log_seq) AS threshold,
          arg_max(detail, log_seq) AS detail, since, max("at") FILTER (state = 'cleared') AS cleared_at
        FROM policy_alarm GROUP BY project, model, alarm, about, since
        """,
)
