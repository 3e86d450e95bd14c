"""Views of agent runs: trajectories, their calls and messages."""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this package

from __future__ import annotations

from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from store.reading.views.view import NEVER, View

TRAJECTORIES = View(
    "trajectories",
    "One row per agent run, open or ended.",
    {
        "group_id": "Empty for a run without a group. In other views such a run is a group with the run's id.",
        "reward": "Reward that the agent reported; null if none. The view `rewards` has the reward for training.",
        "outcome": "`scored`, `no_result` or `masked`; `open` while the run has not ended.",
        "last_step": "Highest policy step that sampled in the run.",
        "metrics": "Metrics given by the agent.",
        "exchanges": "Number of exchange events; null while open.",
        "cost_usd": "What providers charged for its calls, as far as it is known; null while open.",
        "stream_seq": "Sequence of its `rollout.completed` in ROLLOUTS.",
    },
    # Two parts in place of a full join, through which no condition on a column would reach the files.
    f"""
        WITH ended AS (
          SELECT c.project, c.model, c.trajectory, c."group" AS group_id, coalesce(nullif(c.task, ''), o.task) AS task,
            coalesce(c.attempt, o.attempt) AS attempt, coalesce(c.split, o.split) AS split,
            coalesce(c.outcome, 'open') AS outcome, c.reward, c.rewards, c.metrics,
            CASE WHEN coalesce(o.metadata, '{{}}') IN ('', '{{}}') THEN coalesce(c.metadata, o.metadata)
              WHEN coalesce(c.metadata, '{{}}') IN ('', '{{}}') THEN o.metadata
              ELSE json_merge_patch(o.metadata, c.metadata)::VARCHAR END AS metadata,
            c.exchanges, c.calls, c.prompt_tokens, c.sampled_tokens, c.calls_s, c.cost_usd,
            c.first_step, c.last_step, c.inferred,
            coalesce(o.at, nullif(c.opened_at, {NEVER})) AS opened_at, c.at AS completed_at, o.paced_s,
            c.log_seq AS stream_seq, coalesce(nullif(c.traceparent, ''), o.traceparent) AS traceparent
          FROM rollout_completed c LEFT JOIN rollout_opened o USING (project, trajectory)
        ), begun AS (
          SELECT o.project, o.model, o.trajectory, o."group" AS group_id, o.task, o.attempt, o.split,
            'open' AS outcome, o.metadata, o.at AS opened_at, o.paced_s, o.traceparent
          FROM rollout_opened o ANTI JOIN rollout_completed c USING (project, trajectory)
        ), every_one AS (FROM ended UNION ALL BY NAME FROM begun)
        SELECT project, model, trajectory, group_id, task, attempt, split, outcome, reward, rewards, metrics, metadata,
          exchanges, calls, prompt_tokens, sampled_tokens, calls_s, cost_usd, first_step, last_step, inferred,
          opened_at, completed_at, epoch_us(completed_at - opened_at::TIMESTAMP) / 1e6 AS duration_s, paced_s,
          stream_seq, nullif(split_part(traceparent, '-', 2), '') AS trace_id
        FROM every_one
        """,
    sources=(TrajectoryOpened, TrajectoryCompleted),
)

EXCHANGES = View(
    "exchanges",
    "One row per model call and choice, with the exact tokens.",
    {
        "first_token_s": "Seconds to the first token; null where the reply was not streamed.",
        "prompt": "Id of the promoted prompt that the model saw in place of the agent's; null if none.",
        "copied_from": "`<trajectory>/<seq>` of the call that this one is a copy of; null if it was made in this run.",
        "stream_seq": "Sequence in ROLLOUTS.",
    },
    f"""
        SELECT project, model, trajectory, seq, choice, "group" AS group_id, policy_version, step, request, response,
          prompt_ids, sampled_ids, logprobs, forced, len(prompt_ids) AS prompt_tokens,
          len(sampled_ids) AS sampled_tokens, finish_reason, status, side_call, nullif(role, '') AS role, endpoint,
          streamed, replica, nullif(started_at, {NEVER}) AS started_at, "at" AS ended_at,
          epoch_us("at" - nullif(started_at, {NEVER})) / 1e6 AS latency_s,
          epoch_us(nullif(first_token_at, {NEVER}) - nullif(started_at, {NEVER})) / 1e6 AS first_token_s,
          nullif(prompt, '') AS prompt, nullif(copied_from, '') AS copied_from,
          input_tokens, cached_tokens, output_tokens, cost_usd, nullif(error, '') AS error, failed_providers,
          log_seq AS stream_seq,
          nullif(split_part(traceparent, '-', 2), '') AS trace_id
        FROM rollout_exchange
        """,
    sources=(ExchangeRecorded,),
)

MESSAGES = View(
    "messages",
    "One row per chat message of a call: the messages of the request, then the reply.",
    {
        "position": "Place in the call's conversation, from 0; the reply is last.",
        "role": "`system`, `user`, `assistant` or `tool`.",
        "content": "Text; JSON where it has parts.",
        "tool_calls": "Tool calls, JSON; null where there are none.",
        "is_reply": "Whether it is the reply.",
    },
    """
        WITH sent AS (
          SELECT project, model, trajectory, seq, choice, policy_version, "at", response,
            coalesce(json_extract(request, '$.messages[*]'), []) AS sent
          FROM rollout_exchange WHERE json_valid(request) AND json_valid(response)
        ), all_of_them AS (
          SELECT * EXCLUDE (sent, response), len(sent) AS n,
            list_append(sent, json_extract(response, '$.choices[0].message')) AS list
          FROM sent
        ), numbered AS (
          SELECT * EXCLUDE (list), unnest(list) AS message, generate_subscripts(list, 1) - 1 AS position
          FROM all_of_them
        )
        SELECT project, model, trajectory, seq, choice, position, json_extract_string(message, '$.role') AS role,
          json_extract_string(message, '$.content') AS content,
          json_extract_string(message, '$.tool_calls') AS tool_calls,
          position = n AS is_reply, policy_version, "at" AS ended_at
        FROM numbered WHERE message IS NOT NULL
        """,
)

VIEWS = (TRAJECTORIES, EXCHANGES, MESSAGES)
