"""Views of groups: what was scored, by whom, at what cost."""

# ruff: noqa: S608 - the only value put into SQL here is a constant

from __future__ import annotations

from pipeline.events import GroupScored, Member, Score, SignalGiven, Verdict
from pipeline.events.types import REWARD_TOLERANCE
from store.reading.views.view import View

GROUPS = View(
    "groups",
    "One row per group that was scored, or discarded without being scored. A group that two judges scored has a row of "
    "each.",
    {
        "status": "`scored`; `discarded` if it was discarded without being scored.",
        "size": "Number of trajectories that were scored.",
        "reward_mean": "Mean reward of the scored members.",
        "reward_min": "Lowest reward of the scored members.",
        "reward_max": "Highest reward of the scored members.",
        "has_signal": "Whether these rewards differ by more than 1e-6. A group with equal rewards is not trained, "
        "unless it is compared with other groups (`trainer.loss.baseline`). Null for validation groups, which are "
        "never trained.",
        "discarded": "Number of its trajectories that are not trained, before or after the scoring.",
        "reason": "Reason of the discard that covers most of them; null if none was discarded.",
        "decided_by": "Service that made this discard.",
        "stream_seq": "Sequence of the event in GROUPS.",
    },
    # Two parts in place of a full join, through which no condition on a column would reach the files. `discarded` is
    # not materialised: of a union over a materialised table all columns are read, also to count its rows.
    f"""
        WITH scored AS (
          SELECT *, [m.reward FOR m IN members IF m.outcome = 'scored'] AS rewards FROM group_scored
        ), discarded AS NOT MATERIALIZED (
          SELECT project, model, "group", branch, split, len(list_distinct(flatten(list(trajectories)))) AS discarded,
            arg_max(reason, len(trajectories)) AS reason, arg_max("by", len(trajectories)) AS "by", min("at") AS "at",
            arg_min(log_seq, log_at) AS log_seq
          FROM group_discarded GROUP BY ALL
        )
        SELECT s.project, s.model, s."group" AS group_id, s.branch, s.split, s.task, 'scored' AS status, s.judge,
          len(s.members) AS size, list_avg(s.rewards) AS reward_mean, list_min(s.rewards) AS reward_min,
          list_max(s.rewards) AS reward_max,
          CASE s.split WHEN 'train' THEN list_max(s.rewards) - list_min(s.rewards) > {REWARD_TOLERANCE} END
            AS has_signal,
          s.closed_by, s.origin, s.offline, coalesce(d.discarded, 0) AS discarded, d.reason, d."by" AS decided_by,
          s."at" AS decided_at, s.log_seq AS stream_seq
        FROM scored s LEFT JOIN discarded d USING (project, model, "group", branch, split)
        UNION ALL BY NAME
        SELECT d.project, d.model, d."group" AS group_id, d.branch, d.split, 'discarded' AS status, 0 AS size,
          d.discarded, d.reason, d."by" AS decided_by, d."at" AS decided_at, d.log_seq AS stream_seq
        FROM discarded d ANTI JOIN group_scored s USING (project, model, "group", branch, split)
        """,
    sources=(GroupScored,),
)

VERDICTS = View(
    "verdicts",
    "One row per trajectory that a judge scored, and per vote of the judge of kind `next_state` on a call.",
    {
        "verdict": "Number of the verdict in its group, from 0.",
        "position": "Place in which the judge saw the run, from 0; null where it is unknown.",
    },
    """
        WITH each AS (
          SELECT *, unnest(verdicts) AS verdict_, generate_subscripts(verdicts, 1) - 1 AS verdict FROM group_scored
        ), scored AS (SELECT *, unnest(verdict_.scores) AS score_ FROM each)
        SELECT project, model, "group" AS group_id, branch, judge, verdict, verdict_.judge_model AS judge_model,
          verdict_.rubric AS rubric, verdict_.rubric_hash AS rubric_hash, score_.trajectory AS trajectory,
          score_."call" AS "call", score_.score AS score, score_.explanation AS explanation, score_.hint AS hint,
          list_position(verdict_."order", score_.trajectory) - 1 AS position, verdict_.cost_usd AS cost_usd,
          verdict_.latency_s AS latency_s, verdict_.attempts AS attempts, verdict_.left_out AS left_out,
          "at" AS scored_at
        FROM scored
        """,
    sources=(GroupScored, Verdict, Score),
)

REWARDS = View(
    "rewards",
    "One row per member of a scored group, with the reward for training.",
    {
        "reward": "Final reward, after composition; null where `outcome` is not `scored`.",
        "centered": "Reward minus the mean of the group's scored members; its sign is that of the advantage with "
        "`trainer.loss.baseline` = `group`.",
    },
    """
        WITH each AS (
          SELECT *, list_avg([m.reward FOR m IN members IF m.outcome = 'scored']) AS mean, unnest(members) AS m
          FROM group_scored
        )
        SELECT project, model, "group" AS group_id, branch, judge, m.trajectory AS trajectory,
          CASE WHEN m.outcome = 'scored' THEN m.reward END AS reward, m.components AS components,
          m.call_rewards AS call_rewards, m.hints AS hints,
          CASE WHEN m.outcome = 'scored' THEN m.reward - mean END AS centered, m.outcome AS outcome, m.split AS split,
          m.exchanges AS exchanges, m.first_step AS first_step, m.last_step AS last_step, offline, "at" AS scored_at
        FROM each
        """,
    sources=(GroupScored, Member),
)

JUDGE_COST = View(
    "judge_cost",
    "The cost of judging, by day and judge.",
    {"retries": "Calls beyond the first, summed over the verdicts."},
    """
        WITH each AS (SELECT "at", project, model, judge, unnest(verdicts) AS said FROM group_scored)
        SELECT "at"::DATE AS day, project, model, judge, said.judge_model AS judge_model, said.rubric AS rubric,
          count(*) AS verdicts, sum(said.cost_usd) AS cost_usd, sum(said.prompt_tokens)::BIGINT AS prompt_tokens,
          sum(said.completion_tokens)::BIGINT AS completion_tokens, avg(said.latency_s) AS mean_latency_s,
          sum(said.attempts - 1)::BIGINT AS retries
        FROM each GROUP BY ALL
        """,
    sources=(GroupScored, Verdict),
)

SIGNALS = View(
    "signals",
    "One row per signal: feedback on a run or on one of its calls.",
    {"stream_seq": "Sequence in ROLLOUTS."},
    """
        SELECT project, model, trajectory, "group" AS group_id, split, "call", name, kind, value, text,
          "by" AS given_by, source, "at" AS given_at, log_seq AS stream_seq
        FROM rollout_signal
        """,
    sources=(SignalGiven,),
)

LABELS = View(
    "labels",
    "One row per number that a person gave a run under the name `label`, with the judge's score of the run.",
    {
        "score": "The person's score.",
        "judge_model": "Model that judged; `agent` where the agents' rewards were used; null where no judge scored it.",
        "judge_score": "Mean score by that judge on branch `main`.",
    },
    """
        WITH given AS (FROM signals WHERE name = 'label' AND kind = 'number' AND "call" = -1), judged AS (
          SELECT project, group_id, trajectory, judge_model, avg(score) AS judge_score FROM verdicts
          WHERE branch = 'main' AND "call" < 0 AND group_id IN (SELECT group_id FROM given) GROUP BY ALL
        )
        SELECT g.project, g.model, g.group_id, g.trajectory, g.value AS score, g.text, g.given_by, g.source,
          g.given_at, j.judge_model, j.judge_score
        FROM given g LEFT JOIN judged j USING (project, group_id, trajectory)
        """,
    sources=(SignalGiven,),
)

VIEWS = (GROUPS, VERDICTS, REWARDS, SIGNALS, LABELS, JUDGE_COST)
