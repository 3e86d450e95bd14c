"""Views of evaluations on held-out tasks."""

from __future__ import annotations

from store.reading.views.view import View

EVALUATIONS = View(
    "evaluations",
    "One row per evaluation, entrant and measure.",
    {
        "evaluation": "Id that the entrants of one evaluation share.",
        "position": "Place among the entrants; 0 is the baseline of the differences.",
        "entrant": "Name of the entrant as it was given.",
        "kind": "`policy`, or `external` for a model that the gateway does not serve.",
        "version": "Policy version that was pinned; empty for an external entrant.",
        "measure": "`reward`, or the name of a metric.",
        "mean": "Mean over the tasks.",
        "low": "Lower end of its 95 % interval.",
        "high": "Upper end of its 95 % interval.",
        "tasks": "Number of tasks with a value.",
        "difference": "Mean over the tasks of the entrant's value minus the baseline's; null for the baseline.",
        "difference_low": "Lower end of its 95 % interval.",
        "difference_high": "Upper end of its 95 % interval.",
        "pairs": "Number of tasks for which both have a value.",
        "runs": "Number of runs.",
        "failed": "Number of runs that raised.",
        "calls": "Number of model calls.",
        "prompt_tokens": "Number of prompt tokens.",
        "completion_tokens": "Number of sampled tokens.",
        "call_s": "Mean seconds of a model call.",
        "run_p50_s": "Median seconds of a run.",
        "run_p95_s": "95th percentile of the seconds of a run.",
        "wall_s": "Seconds that the entrant took.",
        "cost_usd": "Cost of the calls; null where no price was known.",
        "scenarios": "Where the tasks come from.",
        "rollout": "The function that played them.",
        "evaluated_by": "Name of the API key that recorded it.",
        "evaluated_at": "When it was recorded, UTC.",
    },
    """
        WITH measured AS (SELECT *, unnest(measures) AS m FROM policy_evaluated)
        SELECT project, evaluation, position, entrant, kind, model, version, m.name AS measure, m.mean AS mean,
          m.low AS low, m.high AS high, m.count AS tasks, m.difference AS difference,
          m.difference_low AS difference_low, m.difference_high AS difference_high, m.pairs AS pairs, runs, failed,
          calls, prompt_tokens, completion_tokens, call_s, run_p50_s, run_p95_s, wall_s, cost_usd, scenarios, rollout,
          "by" AS evaluated_by, "at" AS evaluated_at
        FROM measured
        """,
)

EVALUATION_TASKS = View(
    "evaluation_tasks",
    "One row per evaluation, entrant and task.",
    {
        "evaluation": "Id that the entrants of one evaluation share.",
        "position": "Place among the entrants; 0 is the baseline of the differences.",
        "entrant": "Name of the entrant as it was given.",
        "version": "Policy version that was pinned; empty for an external entrant.",
        "task": "Name of the task.",
        "reward": "Mean over the attempts that have a reward.",
        "metrics": "Means of the metrics over these attempts.",
        "attempts": "Number of attempts.",
        "failed": "Number of attempts that raised.",
        "trajectories": "Ids of the runs; empty for an external entrant.",
    },
    """
        WITH played AS (SELECT *, unnest(tasks) AS t FROM policy_evaluated)
        SELECT project, evaluation, position, entrant, model, version, t.task AS task, t.reward AS reward,
          t.metrics AS metrics, t.attempts AS attempts, t.failed AS failed, t.trajectories AS trajectories
        FROM played
        """,
)
