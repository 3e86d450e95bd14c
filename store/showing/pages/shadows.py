"""Shadow calls: how often an apprentice is as good as the outside model, and where it is worse."""

from __future__ import annotations

from typing import Any

from store.showing.pages import chat
from store.showing.pages.history import History
from store.showing.pages.intervals import SAMPLE, with_intervals
from store.showing.pages.lists import Query, list_page

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
    """Return the page of shadow calls: agreement by task and version, with intervals over runs, and the calls where the
    apprentice was worse."""
    worse = list_page(history, query, "(FROM shadows WHERE NOT as_good)", _COLUMNS, equal=("model", "task"))
    for row in worse["rows"]:
        row["task"] = row["task"] or chat.task_text(row["request"])
        row["answers"] = [chat.shown_reply(row[name], 0) for name in ("outside_response", "response")]
    return {**worse, "agreement": with_intervals(history.shared_rows(_AGREEMENT))}
