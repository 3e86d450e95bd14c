"""The views over the files: what each is for, its columns, its SQL. docs/store.md is generated from here.

Below the views lies one table per event tag with every column of docs/events.md, named as the tag with an underscore for the
dot (`rollout_exchange`). Nothing here hides doubles: that an event is there once is the writer's doing. `group` is a word of
SQL's own, so the views say `group_id`.
"""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this file

from __future__ import annotations

from dataclasses import dataclass

_NEVER = "TIMESTAMP '1970-01-01'"


@dataclass(frozen=True)
class View:
    """A documented view."""

    name: str
    purpose: str
    columns: dict[str, str]
    """Name to meaning, in order."""
    sql: str


_WHERE = {"project": "Namespace.", "model": "Serving name of the policy."}
_GROUP = {"group_id": "Group: attempts at one task.", "branch": "Line of history; `main` unless replayed."}

VIEWS: tuple[View, ...] = (  # each after those it reads
    View(
        "trajectories",
        "One row per agent run, begun or ended.",
        {
            **_WHERE,
            "trajectory": "Its id.",
            "group_id": "Group it belongs to.",
            "task": "What the group is about.",
            "attempt": "Number of the attempt, as the caller gave it.",
            "split": "`train` or `val`.",
            "outcome": "`scored`, `no_result`, `masked`; `open` while it has not ended.",
            "reward": "What the agent said it was worth; null: the judge decides.",
            "rewards": "Named components the agent gave.",
            "metrics": "Numbers the agent gave.",
            "metadata": "JSON the agent gave.",
            "exchanges": "How many exchange events belong to it; null while open.",
            "first_step": "Lowest policy step that sampled in it.",
            "last_step": "Highest policy step that sampled in it.",
            "inferred": "The gateway inferred where it began and ended.",
            "opened_at": "When it began, UTC.",
            "completed_at": "When it ended; null while open.",
            "duration_s": "Seconds between the two.",
            "paced_s": "Seconds its group was told to wait before it was let in; 0 for all but the first of the group.",
            "stream_seq": "Sequence of its `rollout.completed` in ROLLOUTS.",
            "trace_id": "Trace it belongs to, where it was traced.",
        },
        f"""
        SELECT coalesce(c.project, o.project) AS project, coalesce(c.model, o.model) AS model,
          coalesce(c.trajectory, o.trajectory) AS trajectory, coalesce(c."group", o."group") AS group_id,
          coalesce(nullif(c.task, ''), o.task) AS task, coalesce(c.attempt, o.attempt) AS attempt,
          coalesce(c.split, o.split) AS split, coalesce(c.outcome, 'open') AS outcome, c.reward, c.rewards, c.metrics,
          coalesce(c.metadata, o.metadata) AS metadata, c.exchanges, c.first_step, c.last_step, c.inferred,
          coalesce(o.at, nullif(c.opened_at, {_NEVER})) AS opened_at, c.at AS completed_at,
          epoch_us(c.at - coalesce(o.at, nullif(c.opened_at, {_NEVER}))::TIMESTAMP) / 1e6 AS duration_s,
          o.paced_s, c.log_seq AS stream_seq,
          nullif(split_part(coalesce(nullif(c.traceparent, ''), o.traceparent), '-', 2), '') AS trace_id
        FROM rollout_completed c FULL JOIN rollout_opened o ON o.project = c.project AND o.trajectory = c.trajectory
        """,
    ),
    View(
        "exchanges",
        "One row per model call and choice, with the exact tokens.",
        {
            **_WHERE,
            "trajectory": "The run it belongs to.",
            "seq": "Position of the call in its run, from 0.",
            "choice": "Index of the choice where the client asked for several.",
            "group_id": "Group of the run.",
            "policy_version": "`<model>@<step>` that sampled.",
            "step": "Its step.",
            "request": "Request body, JSON.",
            "response": "Reply as the client got it, JSON.",
            "prompt_ids": "Prompt token ids.",
            "sampled_ids": "Sampled token ids.",
            "logprobs": "Of the sampled tokens, under the distribution sampled from.",
            "forced": "1 where a grammar left no choice; empty: nowhere.",
            "prompt_tokens": "Length of `prompt_ids`.",
            "sampled_tokens": "Length of `sampled_ids`.",
            "finish_reason": "Why sampling ended.",
            "status": "`complete`, `cancelled`, `failed`.",
            "side_call": "Beside the task: kept, not trained.",
            "endpoint": "Path that was called.",
            "streamed": "Whether the reply was streamed.",
            "replica": "Inference server that answered.",
            "started_at": "When the request came, UTC.",
            "ended_at": "When the reply was complete.",
            "latency_s": "Seconds between the two.",
            "first_token_s": "Seconds to the first token; null where the reply was not streamed.",
            "stream_seq": "Sequence in ROLLOUTS.",
            "trace_id": "Trace it belongs to, where it was traced.",
        },
        f"""
        SELECT project, model, trajectory, seq, choice, "group" AS group_id, policy_version, step, request, response,
          prompt_ids, sampled_ids, logprobs, forced, len(prompt_ids) AS prompt_tokens,
          len(sampled_ids) AS sampled_tokens, finish_reason, status, side_call, endpoint, streamed, replica,
          nullif(started_at, {_NEVER}) AS started_at, "at" AS ended_at,
          epoch_us("at" - nullif(started_at, {_NEVER})) / 1e6 AS latency_s,
          epoch_us(nullif(first_token_at, {_NEVER}) - nullif(started_at, {_NEVER})) / 1e6 AS first_token_s,
          log_seq AS stream_seq, nullif(split_part(traceparent, '-', 2), '') AS trace_id
        FROM rollout_exchange
        """,
    ),
    View(
        "messages",
        "One row per chat message: those each call sent, then the reply.",
        {
            **_WHERE,
            "trajectory": "The run.",
            "seq": "The call.",
            "choice": "The choice.",
            "position": "Place in the call's conversation, from 0; the reply comes last.",
            "role": "`system`, `user`, `assistant`, `tool`.",
            "content": "Text, or JSON where it has parts.",
            "tool_calls": "JSON, where there are any.",
            "is_reply": "True for the reply, false for what was sent.",
            "policy_version": "Version that replied.",
            "ended_at": "When the call ended.",
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
          SELECT * EXCLUDE (list), unnest(list) AS message, generate_subscripts(list, 1) - 1 AS position FROM all_of_them
        )
        SELECT project, model, trajectory, seq, choice, position, json_extract_string(message, '$.role') AS role,
          json_extract_string(message, '$.content') AS content,
          json_extract_string(message, '$.tool_calls') AS tool_calls,
          position = n AS is_reply, policy_version, "at" AS ended_at
        FROM numbered WHERE message IS NOT NULL
        """,
    ),
    View(
        "groups",
        "One row per group that was scored, or dropped with its reason.",
        {
            **_WHERE,
            **_GROUP,
            "split": "`train` or `val`: groups for validation never train.",
            "task": "What the group is about.",
            "status": "`scored` or `discarded`.",
            "judge": "Hash of the judge configuration that scored it.",
            "size": "How many trajectories.",
            "reward_mean": "Mean of the members' rewards (scored ones).",
            "reward_min": "Lowest.",
            "reward_max": "Highest.",
            "has_signal": "Whether rewards differ by more than 1e-6: others train nothing.",
            "closed_by": "`size`, `timeout`, `replay`.",
            "origin": "What it was replayed from.",
            "offline": "Not sampled for this training run.",
            "reason": "Why it was discarded.",
            "decided_by": "Service that discarded it.",
            "decided_at": "When, UTC.",
            "stream_seq": "Sequence in GROUPS.",
        },
        """
        WITH scored AS (
          SELECT *, [m.reward FOR m IN members IF m.outcome = 'scored'] AS rewards FROM group_scored
        )
        SELECT project, model, "group" AS group_id, branch, split, task, 'scored' AS status, judge, len(members) AS size,
          list_avg(rewards) AS reward_mean, list_min(rewards) AS reward_min, list_max(rewards) AS reward_max,
          list_max(rewards) - list_min(rewards) > 1e-6 AS has_signal, closed_by, origin, offline,
          NULL::VARCHAR AS reason, NULL::VARCHAR AS decided_by, "at" AS decided_at, log_seq AS stream_seq
        FROM scored
        UNION ALL
        SELECT project, model, "group", branch, split, NULL, 'discarded', NULL, len(trajectories), NULL, NULL, NULL, NULL, NULL,
          NULL, NULL, reason, "by", "at", log_seq
        FROM group_discarded
        """,
    ),
    View(
        "verdicts",
        "One row per trajectory that a judge scored.",
        {
            **_WHERE,
            **_GROUP,
            "judge": "Hash of the judge configuration.",
            "verdict": "Number of the verdict in its group, from 0.",
            "judge_model": "Model that judged; `agent` where the agents' rewards passed through.",
            "rubric": "The rubric's name.",
            "rubric_hash": "Its hash.",
            "trajectory": "The run scored.",
            "score": "0..1.",
            "explanation": "Why, in the judge's words.",
            "position": "Place in which the judge saw it, from 0; null: unknown.",
            "cost_usd": "Of the whole verdict.",
            "latency_s": "Of the whole verdict.",
            "attempts": "Calls until the reply could be read.",
            "left_out": "Bytes of the whole group that did not fit into the judge's prompt.",
            "scored_at": "When the group was scored, UTC.",
        },
        """
        WITH each AS (
          SELECT *, unnest(verdicts) AS verdict_, generate_subscripts(verdicts, 1) - 1 AS verdict FROM group_scored
        ), scored AS (SELECT *, unnest(verdict_.scores) AS score_ FROM each)
        SELECT project, model, "group" AS group_id, branch, judge, verdict, verdict_.judge_model AS judge_model,
          verdict_.rubric AS rubric, verdict_.rubric_hash AS rubric_hash, score_.trajectory AS trajectory,
          score_.score AS score, score_.explanation AS explanation,
          list_position(verdict_."order", score_.trajectory) - 1 AS position, verdict_.cost_usd AS cost_usd,
          verdict_.latency_s AS latency_s, verdict_.attempts AS attempts, verdict_.left_out AS left_out,
          "at" AS scored_at
        FROM scored
        """,
    ),
    View(
        "rewards",
        "One row per member of a scored group: what training sees.",
        {
            **_WHERE,
            **_GROUP,
            "judge": "Hash of the judge configuration.",
            "trajectory": "The run.",
            "reward": "Final reward, after composition.",
            "components": "Every reward that went into it, by name.",
            "centered": "Reward minus the mean of the group's scored members: the sign of the advantage.",
            "outcome": "`scored`, `no_result`, `masked`.",
            "split": "`train` or `val`.",
            "exchanges": "Calls of the run.",
            "first_step": "Lowest policy step that sampled in it.",
            "last_step": "Highest policy step that sampled in it.",
            "offline": "Not sampled for this training run.",
            "scored_at": "When the group was scored, UTC.",
        },
        """
        WITH each AS (
          SELECT *, list_avg([m.reward FOR m IN members IF m.outcome = 'scored']) AS mean, unnest(members) AS m
          FROM group_scored
        )
        SELECT project, model, "group" AS group_id, branch, judge, m.trajectory AS trajectory, m.reward AS reward,
          m.components AS components, m.reward - mean AS centered, m.outcome AS outcome, m.split AS split,
          m.exchanges AS exchanges, m.first_step AS first_step, m.last_step AS last_step, offline, "at" AS scored_at
        FROM each
        """,
    ),
    View(
        "checkpoints",
        "One row per published policy version.",
        {
            **_WHERE,
            "version": "`<model>@<step>`.",
            "step": "Its step.",
            "parent": "Version it was trained from.",
            "branch": "Line of history.",
            "batch_id": "Hash of parent, groups and training config.",
            "groups": "Ids of the groups it learned from.",
            "group_seqs": "Their sequences in GROUPS.",
            "config_hash": "Hash of the training config.",
            "base_model": "Model that the adapter adapts.",
            "adapter": "Object name of the adapter.",
            "adapter_sha256": "Its digest.",
            "adapter_bytes": "Its size.",
            "files": "File name to SHA-256.",
            "metrics": "Numbers of the step.",
            "started_at": "When the step began, UTC.",
            "published_at": "When it was published.",
        },
        f"""
        SELECT project, model, version, step, parent, branch, batch_id, groups, group_seqs, config_hash, base_model,
          adapter, adapter_sha256, adapter_bytes, files, metrics, nullif(started_at, {_NEVER}) AS started_at,
          "at" AS published_at
        FROM policy_checkpoint
        """,
    ),
    View(
        "adapters",
        "Delivery: one row per version and replica that loaded it; a version that reached no one has one row without.",
        {
            **_WHERE,
            "version": "`<model>@<step>`.",
            "step": "Its step.",
            "replica": "Inference server; null: none has loaded it.",
            "gateway": "Gateway that had it loaded.",
            "published_at": "When the checkpoint was published, UTC; null for a version from elsewhere.",
            "loaded_at": "When the replica served it.",
            "delay_s": "Seconds between the two.",
            "load_s": "Seconds the loading took.",
            "probe_delta": "Largest difference of a probe's logprobs to the base model; 0 would be a silent no-op.",
            "digest_matches": "Whether what was loaded is what was published.",
            "incarnation": "Tells one life of the replica from the next.",
        },
        """
        SELECT coalesce(l.project, c.project) AS project, coalesce(l.model, c.model) AS model,
          coalesce(l.version, c.version) AS version, coalesce(l.step, c.step) AS step, l.replica, l.gateway,
          c.at AS published_at, l.at AS loaded_at, epoch_us(l.at - c.at) / 1e6 AS delay_s, l.load_s, l.probe_delta,
          l.adapter_sha256 = c.adapter_sha256 AS digest_matches, l.incarnation
        FROM policy_checkpoint c FULL JOIN policy_loaded l
          ON l.project = c.project AND l.model = c.model AND l.version = c.version
        """,
    ),
    View(
        "lineage",
        "From a checkpoint to its groups, trajectories, exchanges and verdicts: one row per exchange that fed it.",
        {
            **_WHERE,
            "version": "Checkpoint.",
            "step": "Its step.",
            "parent": "Version it was trained from.",
            "batch_id": "Its batch.",
            "published_at": "When it was published, UTC.",
            "group_id": "Group it consumed.",
            "group_seq": "The group's sequence in GROUPS.",
            "branch": "Line of history.",
            "judge": "Judge configuration that scored the group.",
            "trajectory": "Run in the group.",
            "outcome": "Its outcome.",
            "reward": "Its final reward.",
            "verdicts": "What each judge said of it: judge_model, rubric, score, explanation.",
            "seq": "Call of the run; null: its exchanges are not in the store.",
            "choice": "Choice of the call.",
            "policy_version": "Version that sampled it.",
            "staleness": "Steps between what sampled and what was trained on top of.",
            "sampled_tokens": "How many tokens it sampled.",
            "exchange_seq": "The exchange's sequence in ROLLOUTS.",
        },
        """
        WITH consumed AS (
          SELECT project, model, version, step, parent, batch_id, "at", branch,
            unnest(groups) AS group_id, unnest(group_seqs) AS group_seq, unnest(group_times) AS group_time
          FROM policy_checkpoint
        ), members AS (
          SELECT c.*, g.branch AS group_branch, g.judge, g.log_seq, g.verdicts AS verdicts_, unnest(g.members) AS m
          FROM consumed c JOIN group_scored g ON g.project = c.project AND g."group" = c.group_id AND g.model = c.model
            AND (c.group_seq IS NULL OR g.log_seq = c.group_seq)
            AND (c.group_time IS NULL OR epoch_us(g.log_at) = c.group_time)
        )
        SELECT m.project, m.model, m.version, m.step, m.parent, m.batch_id, m.at AS published_at, m.group_id,
          m.log_seq AS group_seq, m.group_branch AS branch, m.judge, m.m.trajectory AS trajectory,
          m.m.outcome AS outcome, m.m.reward AS reward,
          list_transform(m.verdicts_, lambda said: {
            'judge_model': said.judge_model, 'rubric': said.rubric,
            'score': list_filter(said.scores, lambda one: one.trajectory = m.m.trajectory)[1].score,
            'explanation': list_filter(said.scores, lambda one: one.trajectory = m.m.trajectory)[1].explanation
          }) AS verdicts,
          e.seq, e.choice, e.policy_version, m.step - 1 - e.step AS staleness, len(e.sampled_ids) AS sampled_tokens,
          e.log_seq AS exchange_seq
        FROM members m LEFT JOIN rollout_exchange e ON e.project = m.project AND e.trajectory = m.m.trajectory
        """,
    ),
    View(
        "staleness",
        "How old what a step learned from was: one row per trained trajectory and checkpoint.",
        {
            **_WHERE,
            "version": "Checkpoint.",
            "step": "Its step.",
            "branch": "Line of history of the checkpoint.",
            "group_id": "Group.",
            "trajectory": "Run.",
            "reward": "Its final reward.",
            "staleness_min": "Steps between the newest version that sampled in it and the one trained on top of.",
            "staleness_max": "The same for the oldest version.",
            "wait_s": "Seconds from the group's scoring to the checkpoint.",
            "scored_at": "When the group was scored, UTC.",
        },
        """
        WITH consumed AS (
          SELECT project, model, version, step, "at", branch, unnest(groups) AS group_id, unnest(group_seqs) AS group_seq,
            unnest(group_times) AS group_time
          FROM policy_checkpoint
        ), members AS (
          SELECT c.*, g.at AS scored_at, unnest(g.members) AS m
          FROM consumed c JOIN group_scored g ON g.project = c.project AND g."group" = c.group_id AND g.model = c.model
            AND (c.group_seq IS NULL OR g.log_seq = c.group_seq)
            AND (c.group_time IS NULL OR epoch_us(g.log_at) = c.group_time)
        )
        SELECT project, model, version, step, branch, group_id, m.trajectory AS trajectory, m.reward AS reward,
          step - 1 - m.last_step AS staleness_min, step - 1 - m.first_step AS staleness_max,
          epoch_us("at" - scored_at) / 1e6 AS wait_s, scored_at
        FROM members WHERE m.outcome = 'scored'
        """,
    ),
    View(
        "steps",
        "One row per optimizer step: what went in and what came of it.",
        {
            **_WHERE,
            "version": "Version it made.",
            "step": "Its step.",
            "branch": "Line of history.",
            "groups": "How many groups.",
            "trajectories": "How many scored trajectories.",
            "reward_mean": "Their mean reward.",
            "reward_mean_all": "Mean reward of every training run scored since the newest group of the step before, up to this step's: also those whose group taught nothing because its rewards were equal.",
            "mean_staleness": "Mean of (step before this one − lowest step sampled) over them.",
            "duration_s": "Seconds from the step's begin to its publishing.",
            "metrics": "Numbers the trainer gave.",
            "published_at": "When, UTC.",
        },
        """
        WITH stepped AS (
          SELECT c.project, c.model, c.version, any_value(c.step) AS step, c.branch,
            count(DISTINCT m.group_id) AS groups, count(m.trajectory) AS trajectories, avg(m.reward) AS reward_mean,
            avg(m.staleness_max) AS mean_staleness,
            any_value(epoch_us(c.published_at - c.started_at) / 1e6) AS duration_s,
            any_value(c.metrics) AS metrics, any_value(c.published_at) AS published_at, max(m.scored_at) AS newest
          FROM checkpoints c LEFT JOIN staleness m
            ON m.project = c.project AND m.model = c.model AND m.version = c.version AND m.branch = c.branch
          GROUP BY c.project, c.model, c.version, c.branch
        ), counted AS (
          SELECT s.project, s.model, s.branch, s.version, avg(r.reward) AS reward_mean_all
          FROM rewards r ASOF JOIN (SELECT * FROM stepped WHERE newest IS NOT NULL) s
            ON r.project = s.project AND r.model = s.model AND r.branch = s.branch AND r.scored_at <= s.newest
          WHERE r.split = 'train' AND r.outcome = 'scored'
          GROUP BY ALL
        )
        SELECT s.project, s.model, s.version, s.step, s.branch, s.groups, s.trajectories, s.reward_mean,
          a.reward_mean_all, s.mean_staleness, s.duration_s, s.metrics, s.published_at
        FROM stepped s LEFT JOIN counted a
          ON a.project = s.project AND a.model = s.model AND a.branch = s.branch AND a.version = s.version
        """,
    ),
    View(
        "starvation",
        "What never trained and why, by duration: shows whether long tasks starve.",
        {
            **_WHERE,
            "group_id": "Group.",
            "branch": "Line of history.",
            "trajectory": "Run that was dropped.",
            "reason": "Reason of the discard, or the outcome that can't train (`no_result`, `masked`).",
            "dropped_by": "Service that decided; `agent` for an outcome.",
            "detail": "In words.",
            "version": "Policy version at which it was decided, where that matters.",
            "duration_s": "Seconds the run took; the longest of its group where its own is unknown.",
            "duration": "The same as a range: `<1s`, `<10s`, `<1m`, `<10m`, `<1h`, `>=1h`.",
            "dropped_at": "When it was dropped, UTC.",
        },
        """
        WITH dropped AS (
          SELECT d.project, d.model, d."group" AS group_id, d.branch, unnest(d.trajectories) AS trajectory, d.reason,
            d."by" AS dropped_by, d.detail, d.version, d.duration_s AS longest_s, d.at AS dropped_at
          FROM group_discarded d
        ), timed AS (
          SELECT d.* EXCLUDE (longest_s), coalesce(t.duration_s, nullif(d.longest_s, 0)) AS duration_s
          FROM dropped d LEFT JOIN trajectories t ON t.project = d.project AND t.trajectory = d.trajectory
          UNION ALL BY NAME
          SELECT project, model, group_id, 'main' AS branch, trajectory, outcome AS reason, 'agent' AS dropped_by,
            '' AS detail, '' AS version, completed_at AS dropped_at, duration_s
          FROM trajectories WHERE outcome IN ('no_result', 'masked')
        )
        SELECT project, model, group_id, branch, trajectory, reason, dropped_by, detail, version, duration_s,
          CASE WHEN duration_s < 1 THEN '<1s' WHEN duration_s < 10 THEN '<10s' WHEN duration_s < 60 THEN '<1m'
            WHEN duration_s < 600 THEN '<10m' WHEN duration_s < 3600 THEN '<1h' WHEN duration_s >= 3600 THEN '>=1h'
          END AS duration, dropped_at
        FROM timed
        """,
    ),
    View(
        "judge_cost",
        "What judging costs, by day and judge.",
        {
            "day": "UTC.",
            **_WHERE,
            "judge": "Hash of the judge configuration.",
            "judge_model": "Model that judged.",
            "rubric": "The rubric's name.",
            "verdicts": "How many verdicts.",
            "cost_usd": "Their cost.",
            "prompt_tokens": "Tokens read.",
            "completion_tokens": "Tokens written.",
            "mean_latency_s": "Mean seconds a verdict took.",
            "retries": "Calls beyond the first, over all verdicts.",
        },
        """
        WITH each AS (SELECT "at", project, model, judge, unnest(verdicts) AS said FROM group_scored)
        SELECT "at"::DATE AS day, project, model, judge, said.judge_model AS judge_model, said.rubric AS rubric,
          count(*) AS verdicts, sum(said.cost_usd) AS cost_usd, sum(said.prompt_tokens)::BIGINT AS prompt_tokens,
          sum(said.completion_tokens)::BIGINT AS completion_tokens, avg(said.latency_s) AS mean_latency_s,
          sum(said.attempts - 1)::BIGINT AS retries
        FROM each GROUP BY ALL
        """,
    ),
    View(
        "dead",
        "What no one could use, with the reason.",
        {
            "dead_seq": "Sequence in DEAD: what `journeyman dead` takes.",
            "stream": "Stream it came from.",
            "stream_seq": "Its sequence there.",
            "subject": "Its subject there.",
            "consumer": "Consumer that gave it up.",
            "reason": "`undecodable`, `unstorable`, `max_deliver`, …",
            "detail": "In words.",
            "deliveries": "How often it had been delivered.",
            "payload": "The message itself.",
            "headers": "Its headers.",
            "dead_at": "When it was given up, UTC.",
        },
        """
        SELECT log_seq AS dead_seq, stream, stream_seq, original_subject AS subject, consumer, reason, detail, deliveries,
          payload, headers, "at" AS dead_at
        FROM dead_letter
        """,
    ),
)
