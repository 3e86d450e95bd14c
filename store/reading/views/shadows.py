"""The view of shadow calls: what an apprentice answered beside the outside model that it learns from."""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this package

from __future__ import annotations

from pipeline.events import AnswersCompared, ShadowAnswered
from store.reading.views.view import NEVER, View

SHADOWS = View(
    "shadows",
    "One row per shadow call: the answer of an outside model, and that of the apprentice to the same call.",
    {
        "model": "The apprentice.",
        "outside_score": "The judge's score of the outside model's answer; null where it compared none.",
        "apprentice_score": "The judge's score of the apprentice's answer.",
        "as_good": "Whether the apprentice's answer is the same, or the judge scored it no lower.",
        "mean_logprob": "Mean of `logprobs`: how sure the apprentice was.",
        "least_logprob": "Least of `logprobs`.",
        "outside_response": "The outside model's chat completion.",
        "request": "The request, as it is recorded.",
        "cost_usd": "What the outside model's answer cost.",
        "latency_s": "Seconds that the apprentice took.",
        "outside_latency_s": "Seconds that the outside model took.",
        "answered_at": "When the apprentice had answered, UTC.",
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
        FROM rollout_shadow s
        LEFT JOIN rollout_exchange e
          ON e.project = s.project AND e.trajectory = s.trajectory AND e.seq = s."call" AND e.choice = 0
        LEFT JOIN rollout_compared c ON c.project = s.project AND c.trajectory = s.trajectory AND c."call" = s."call"
        LEFT JOIN rollout_opened o ON o.project = s.project AND o.trajectory = s.trajectory
        """,
    sources=(ShadowAnswered, AnswersCompared),
)
