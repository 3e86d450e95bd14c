"""Shadow calls: how often an apprentice is as good as the outside model, and where it is worse."""

from __future__ import annotations

from typing import Any

from store.showing.pages import chat
from store.showing.pages.history import History
from store.showing.pages.intervals import SAMPLE, with_intervals
from store.showing.pages.lists import Query, listed

_AGREEMENT = f"""
    WITH by_run AS (
      SELECT model, outside, task, policy_version, trajectory, count(*) AS calls, avg(same::INTEGER) AS same,
        avg(as_good::INTEGER) AS "value"
      FROM shadows GROUP BY ALL
    )
    SELECT model, outside, task, policy_version, sum(calls)::BIGINT AS calls, avg(same) AS same, {SAMPLE}
    FROM by_run GROUP BY model, outside, task, policy_version
    ORDER BY model, max(trajectory) DESC, calls DESC LIMIT 200
"""  # noqa: S608
_COLUMNS = {"when": "answered_at", "task": "task", "logprob": "mean_logprob"}


def shadows(history: History, query: Query) -> dict[str, Any]:
    """Agreement by task and version, with intervals over runs, and the calls where the apprentice was worse."""
    worse = listed(
        history, query, "(FROM shadows WHERE NOT as_good)", _COLUMNS, model="model = $model", task="task = $task"
    )
    rows = [
        {
            **{name: row[name] for name in ("answered_at", "trajectory", "seq", "model", "policy_version")},
            **{name: row[name] for name in ("outside_score", "apprentice_score", "mean_logprob")},
            "task": row["task"] or chat.task(row["request"]),
            "outside": chat.reply(row["outside_response"], 0),
            "apprentice": chat.reply(row["response"], 0),
        }
        for row in worse["rows"]
    ]
    return {**worse, "rows": rows, "agreement": with_intervals(history.shared_rows(_AGREEMENT))}
