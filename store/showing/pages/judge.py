"""Judges: agreement, bias, drift against anchors, cost, and how the scores lie."""

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
_SCORES = """
    SELECT judge_model, rubric, floor(least(greatest(score, 0), 0.999) * 10) / 10 AS low, count(*) AS trajectories
    FROM verdicts WHERE judge_model <> 'agent' AND "call" < 0 GROUP BY ALL ORDER BY ALL
"""
_POSITIONS = """
    SELECT judge_model, position, count(*) AS trajectories, avg(score) AS mean FROM verdicts
    WHERE position IS NOT NULL GROUP BY ALL ORDER BY ALL
"""


def judge(history: History, query: Query) -> dict[str, Any]:
    """What was measured of the judges, their agreement with people, their cost and their scores."""
    return {
        "measured": history.rows('SELECT * FROM group_measured ORDER BY "at" DESC LIMIT 200'),
        "costs": history.shared_rows(
            "SELECT * FROM judge_cost ORDER BY day DESC, project, model, judge, judge_model, rubric LIMIT 100"
        ),
        "scores": history.shared_rows(_SCORES),
        "positions": history.shared_rows(_POSITIONS),
        "agreement": history.rows(_AGREEMENT),
    }
