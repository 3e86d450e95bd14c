"""Views of comparisons: evaluations on held-out tasks, and shadow calls, in which an apprentice answers beside the
outside model that it learns from."""
# ruff: noqa: S608 - the only text put into SQL here is a constant of this package

from __future__ import annotations

from pipeline.events import AnswersCompared, Measure, PolicyEvaluated, ShadowAnswered, TaskResult
from store.reading.views.view import NEVER, View

EVALUATIONS = View(
    "evaluations",
    "One row per evaluation, entrant and measure.",
    {
        "measure": "`reward`, or the name of a metric.",
        "low": "Lower end of its 95 % interval.",
        "evaluated_by": "Name of the API key that recorded it.",
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


SHADOWS = View(
    "shadows",
    "One row per shadow call: the answer of an outside model, and that of the apprentice to the same call.",
    {
        "model": "The apprentice.",
        "outside_score": "The judge's score of the outside model's answer; null where it compared none.",
        "apprentice_score": "The judge's score of the apprentice's answer.",
        "as_good": "Whether the apprentice's answer is the same, or the judge scored it no lower.",
        "stream_seq": "Sequence of `rollout.shadow` in ROLLOUTS.",
    },
    f"""
        SELECT s.project, s.model, s.outside, s.trajectory, s."call" AS seq, o.task, s.policy_version, s.step, s.same,
          c.outside_score, c.apprentice_score,
          s.same OR coalesce(c.apprentice_score >= c.outside_score, false) AS as_good,
          s.prompt_tokens, s.sampled_ids, s.logprobs, list_avg(s.logprobs) AS mean_logprob,
          list_min(s.logprobs) AS least_logprob, s.finish_reason, e.request, e.response AS outside_response, s.response,
          e.cost_usd, epoch_us(s."at" - nullif(s.started_at, {NEVER})) / 1e6 AS latency_s,
          epoch_us(e."at" - nullif(e.started_at, {NEVER})) / 1e6 AS outside_latency_s, s."at" AS answered_at,
          s.log_seq AS stream_seq
        FROM rollout_shadow s LEFT JOIN rollout_compared c USING (project, trajectory, "call")
        LEFT JOIN rollout_opened o USING (project, trajectory) LEFT JOIN rollout_exchange e
          ON e.project = s.project AND e.trajectory = s.trajectory AND e.seq = s."call" AND e.choice = 0
        """,
    sources=(ShadowAnswered, AnswersCompared),
)

VIEWS = (EVALUATIONS, EVALUATION_TASKS, SHADOWS)
