"""Views of evaluations on held-out tasks."""

from __future__ import annotations

from pipeline.events import Measure, PolicyEvaluated, TaskResult
from store.reading.views.view import View

EVALUATIONS = View(
    "evaluations",
    "One row per evaluation, entrant and measure.",
    {
        "measure": "`reward`, or the name of a metric.",
        "mean": "Mean over the tasks.",
        "low": "Lower end of its 95 % interval.",
        "tasks": "Number of tasks with a value.",
        "evaluated_by": "Name of the API key that recorded it.",
        "evaluated_at": "When it was recorded, UTC.",
    },
    """
        WITH measured AS (SELECT *, unnest(measures) AS m FROM policy_evaluated)
        SELECT project, evaluation, position, entrant, kind, model, version, m.name AS measure, m.mean AS mean,
          m.low AS low, m.high AS high, m.count AS tasks, m.difference AS difference,
          m.difference_low AS difference_low, m.difference_high AS difference_high, m.pairs AS pairs, runs, failed,
          calls, prompt_tokens, completion_tokens, call_s, run_p50_s, run_p95_s, wall_s, cost_usd, scenarios, rollout,
          prompt, "by" AS evaluated_by, "at" AS evaluated_at
        FROM measured
        """,
    sources=(PolicyEvaluated, Measure),
)

EVALUATION_TASKS = View(
    "evaluation_tasks",
    "One row per evaluation, entrant and task.",
    {"failed": "Number of attempts that raised.", "metrics": "Means of the metrics over these attempts."},
    """
        WITH played AS (SELECT *, unnest(tasks) AS t FROM policy_evaluated)
        SELECT project, evaluation, position, entrant, model, version, t.task AS task, t.reward AS reward,
          t.metrics AS metrics, t.attempts AS attempts, t.failed AS failed, t.trajectories AS trajectories
        FROM played
        """,
    sources=(PolicyEvaluated, TaskResult),
)
