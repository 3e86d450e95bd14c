"""Judges: agreement, bias, drift against anchors, and cost."""

from __future__ import annotations

from typing import Any

from store.showing.pages.history import History
from store.showing.pages.lists import Query

_AGREEMENT = """
    WITH one AS (
      SELECT *, row_number() OVER (PARTITION BY project, group_id, trajectory, given_by, judge_model
        ORDER BY given_at DESC) AS newest
      FROM labels WHERE judge_model IS NOT NULL
    )
    SELECT a.judge_model, a.given_by, count(*) AS pairs,
      avg(CASE WHEN sign(a.score - b.score) = sign(a.judge_score - b.judge_score) THEN 1.0 ELSE 0.0 END) AS share
    FROM one a JOIN one b USING (project, group_id, given_by, judge_model)
    WHERE a.newest = 1 AND b.newest = 1 AND a.trajectory < b.trajectory AND a.score <> b.score
    GROUP BY ALL ORDER BY ALL
"""
"""The share of pairs that a person and the judge put into the same order, over each person's newest labels."""


def judge(history: History, query: Query) -> dict[str, Any]:
    """Return the page of what was measured of the judges, their agreement with people, and their cost."""
    return {
        "measured": history.rows('SELECT * FROM group_measured ORDER BY "at" DESC LIMIT 200'),
        "costs": history.shared_rows(
            "SELECT * FROM judge_cost ORDER BY day DESC, project, model, judge, judge_model, rubric LIMIT 100"
        ),
        "agreement": history.rows(_AGREEMENT),
    }
