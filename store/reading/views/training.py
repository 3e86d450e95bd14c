"""Views of training: checkpoints, their delivery, what they learned from, and whether the reward moved."""
# ruff: noqa: S608 - the only text put into SQL here is a constant of this package

from __future__ import annotations

from pipeline.events import CheckpointPublished, PolicyLoaded
from pipeline.statistics.progress import MOST_STEPS, SHARE
from store.reading.views.view import NEVER, View

CHECKPOINTS = View(
    "checkpoints",
    "One row per published policy version.",
    {"groups": "Ids of the groups that it was trained on.", "started_at": "When the step began, UTC."},
    f"""
        SELECT project, model, version, step, parent, branch, batch_id, groups, group_seqs, config_hash, base_model,
          adapter, adapter_sha256, adapter_bytes, files, source, metrics, nullif(started_at, {NEVER}) AS started_at,
          "at" AS published_at
        FROM policy_checkpoint
        """,
    sources=(CheckpointPublished,),
)

ADAPTERS = View(
    "adapters",
    "Delivery: one row per version and replica that loaded it. A version that no replica loaded has one row without a "
    "replica.",
    {
        "replica": "Inference server that loaded it; null where none has.",
        "delay_s": "Seconds from `published_at` to `loaded_at`.",
        "digest_matches": "Whether the loaded adapter is the published one.",
    },
    """
        SELECT project, model, version, coalesce(l.step, c.step) AS step, l.replica, c.at AS published_at,
          l.at AS loaded_at, epoch_us(l.at - c.at) / 1e6 AS delay_s, l.load_s, l.probe_delta,
          l.adapter_sha256 = c.adapter_sha256 AS digest_matches, l.server_start
        FROM policy_checkpoint c FULL JOIN policy_loaded l USING (project, model, version)
        """,
    sources=(PolicyLoaded,),
)

_MEMBERS = """
        WITH consumed AS (
          SELECT project, model, version, step, parent, batch_id, "at", branch,
            unnest(groups) AS group_id, unnest(group_seqs) AS group_seq, unnest(group_times) AS group_time
          FROM policy_checkpoint
        ), members AS (
          SELECT c.*, g.branch AS group_branch, g.judge, g.log_seq, g.log_at, g.at AS scored_at,
            g.verdicts AS verdicts_, unnest(g.members) AS m
          FROM consumed c JOIN group_scored g ON g.project = c.project AND g."group" = c.group_id AND g.model = c.model
            AND (c.group_seq IS NULL OR g.log_seq = c.group_seq)
            AND (c.group_time IS NULL OR epoch_us(g.log_at) = c.group_time)
        )
"""
"""The members of the groups that checkpoints learned from, as the CTE `members`. Older checkpoints lack places of
their groups."""

# A run whose calls the log lost with its tail may have been played again under the same id: the lake has the calls of
# both. Those of the group are of its member's steps, and the newest that the log had when it took the group in.
LINEAGE = View(
    "lineage",
    "A checkpoint's groups, trajectories, exchanges and verdicts: one row per exchange that it was trained on. A "
    "checkpoint that was made of something else, such as a data set, has one row, with its `source`.",
    {
        "group_seq": "Sequence of the group in GROUPS.",
        "verdicts": "Each judge's verdict on the run (call -1) or on a call: judge_model, rubric, score, explanation.",
        "seq": "Number of the call in its run; null where its exchanges are not in the store.",
        "staleness": "Steps between the version that sampled and the one that was trained from.",
        "exchange_seq": "Sequence of the exchange in ROLLOUTS.",
        "source": "What it was made of instead of groups, as `checkpoints` has it.",
    },
    f"""
        {_MEMBERS.strip()}
        SELECT m.project, m.model, m.version, m.step, m.parent, m.batch_id, m.at AS published_at, m.group_id,
          m.log_seq AS group_seq, m.group_branch AS branch, m.judge, m.m.trajectory AS trajectory,
          m.m.outcome AS outcome, m.m.reward AS reward,
          flatten(list_transform(m.verdicts_, lambda said: list_transform(
            list_filter(said.scores, lambda scored: scored.trajectory = m.m.trajectory), lambda scored: {{
              'judge_model': said.judge_model, 'rubric': said.rubric, 'score': scored.score,
              'explanation': scored.explanation, 'call': scored."call"
          }}))) AS verdicts,
          e.seq, e.choice, e.policy_version, m.step - 1 - e.step AS staleness, len(e.sampled_ids) AS sampled_tokens,
          e.log_seq AS exchange_seq
        FROM members m LEFT JOIN rollout_exchange e ON e.project = m.project AND e.trajectory = m.m.trajectory
          AND e.step BETWEEN m.m.first_step AND m.m.last_step
        QUALIFY 1 = row_number() OVER (
          PARTITION BY m.project, m.model, m.version, m.group_id, m.log_seq, m.m.trajectory, e.seq, e.choice
          ORDER BY e.log_at <= m.log_at DESC, e.log_at DESC
        )
        UNION ALL BY NAME
        SELECT project, model, version, step, parent, batch_id, "at" AS published_at, branch, source
        FROM policy_checkpoint WHERE source <> ''
        """,
)

STALENESS = View(
    "staleness",
    "How old the trained trajectories were: one row per trajectory and checkpoint.",
    {
        "staleness_min": "Steps between the newest version that sampled in the run and the one that was trained from.",
        "staleness_max": "Steps between the oldest version that sampled in the run and the one that was trained from.",
        "wait_s": "Seconds from the group's scoring to the checkpoint.",
    },
    f"""
        {_MEMBERS.strip()}
        SELECT project, model, version, step, branch, group_id, m.trajectory AS trajectory, m.reward AS reward,
          step - 1 - m.last_step AS staleness_min, step - 1 - m.first_step AS staleness_max,
          epoch_us("at" - scored_at) / 1e6 AS wait_s, scored_at
        FROM members WHERE m.outcome = 'scored'
        """,
)

STEPS = View(
    "steps",
    "One row per optimizer step: its batch and its results.",
    {
        "reward_mean_all": "Mean reward of all training runs that were scored after the newest group of the step "
        "before, up to the newest of this step. It includes groups that were not trained because their rewards were "
        "equal.",
        "mean_staleness": "Mean over the trajectories of the steps between the oldest version that sampled and the one "
        "that was trained from.",
    },
    """
        WITH stepped AS (
          SELECT c.project, c.model, c.version, any_value(c.step) AS step, c.branch,
            count(DISTINCT m.group_id) AS groups, count(m.trajectory) AS trajectories, avg(m.reward) AS reward_mean,
            avg(m.staleness_max) AS mean_staleness,
            any_value(epoch_us(c.published_at - c.started_at) / 1e6) AS duration_s,
            any_value(c.metrics) AS metrics, any_value(c.published_at) AS published_at, max(m.scored_at) AS newest
          FROM checkpoints c LEFT JOIN staleness m USING (project, model, version, branch)
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
        FROM stepped s LEFT JOIN counted a USING (project, model, branch, version)
        """,
)


def _statistics_of(name: str, condition: str) -> str:
    """Return SQL of the columns `<name>_groups`, `<name>_mean` and so on, over the rows that meet a condition."""
    aggregates = {"mean": "avg", "variance": "var_samp", "least": "min", "greatest": "max"}
    return f"count(*) FILTER ({condition}) AS {name}_groups, " + ", ".join(
        f"{function}(reward) FILTER ({condition}) AS {name}_{column}" for column, function in aggregates.items()
    )


PROGRESS = View(
    "progress",
    "Whether the training reward moved: one row per model and branch, with the scored groups that the first versions "
    f"sampled and those that the last versions sampled: a fifth of the versions each, at most {MOST_STEPS}. Of the "
    "groups' mean rewards it has number, mean, sample variance, least and greatest.",
    {"first_step": "The first step that sampled a training group; 0 is the base model.", "last_step": "The last one."},
    f"""
        WITH played AS (
          SELECT project, model, branch, group_id, max(last_step) AS step, avg(reward) AS reward FROM rewards
          WHERE split = 'train' AND outcome = 'scored' AND NOT offline AND last_step IS NOT NULL AND isfinite(reward)
          GROUP BY ALL
        ), spans AS (
          SELECT project, model, branch, min(step) AS first_step, max(step) AS last_step,
            least({MOST_STEPS}, (max(step) - min(step)) // {SHARE} + 1) AS width
          FROM played GROUP BY ALL
        )
        SELECT project, model, branch, first_step, last_step,
          {_statistics_of("first", "step < first_step + width")},
          {_statistics_of("last", "step > last_step - width")}
        FROM played JOIN spans USING (project, model, branch) GROUP BY ALL
        """,
)

VIEWS = (CHECKPOINTS, ADAPTERS, LINEAGE, STALENESS, STEPS, PROGRESS)
