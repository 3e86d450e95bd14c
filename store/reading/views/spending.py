"""The views of what learning costs, against what it gains, of who waits for whom, and of what runs cost, whoever
answered."""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this package

from __future__ import annotations

from pipeline.events import ExchangeRecorded, TrajectoryOpened
from pipeline.statistics.utilization import BUSY
from store.reading.views.view import GPU_USD_S, NEVER, View


def _answering(partition: str, name: str) -> str:
    """Return SQL of a row for each call, shadow calls too, with the seconds in which it was answered and no call before
    it was, as the column `name`. So the sum over calls counts no second twice. `partition`: the columns that such
    calls have in common, such as `replica`."""
    return f"""
          SELECT project, model, trajectory, version, shadow, "at", greatest(0, epoch_us("at" - greatest(
            started_at, coalesce(max("at") OVER (
              PARTITION BY {partition} ORDER BY started_at, log_seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), started_at)))) / 1e6 AS {name}
          FROM (
            SELECT project, model, trajectory, policy_version AS version, false AS shadow, "at", started_at, replica,
              log_seq
            FROM rollout_exchange WHERE copied_from = '' AND NOT starts_with(policy_version, 'outside:')
            UNION ALL BY NAME
            SELECT project, model, trajectory, policy_version AS version, true AS shadow, "at", started_at, replica,
              log_seq
            FROM rollout_shadow
          ) WHERE started_at > {NEVER}
    """


_SERVED = f"""served AS (
          SELECT project, trajectory, version, sum(gpu_s) AS gpu_s FROM ({_answering("replica", "gpu_s")})
          WHERE NOT shadow GROUP BY ALL
        )"""
"""SQL of a table of the seconds that inference servers took for a run, by version."""

_FINAL = """final AS (
          SELECT project, trajectory, arg_max(reward, scored_at) AS reward FROM rewards
          WHERE branch = 'main' AND outcome = 'scored' GROUP BY ALL
        )"""
"""SQL of a table of the newest rewards for training."""


SPENDING = View(
    "spending",
    "What was spent until each step of branch `main`, since the step before, and the success on held-out tasks; "
    "`total_…`: of the step and all before it. The last row of a model, without a version, is what was spent since its "
    "newest step.",
    {
        "version": "The step's version; null for what was spent since the newest step.",
        "judge_usd": "Cost of the verdicts on groups, of all branches, and on single answers.",
        "train_gpu_s": "Seconds of the steps, times `trainer.processes`.",
        "serve_gpu_s": "Seconds in which an inference server answered a call, or several at once, shadow calls too. A "
        "GPU that trainer and server share is counted for both.",
        "sampled_tokens": "Tokens that were sampled in runs that ended.",
        "held_out": "Mean reward of the version's validation runs; of a model that has none, of its evaluation on the "
        "scenarios that were evaluated last. Null where the version has neither.",
        "gain": "`held_out` minus that of the first version that has one, which may be step 0.",
    },
    f"""
        WITH calls AS (
          {_answering("replica", "serve_gpu_s")}
        ), spent AS (
          SELECT project, model, "at", said.cost_usd AS judge_usd
          FROM (
            SELECT project, model, "at", unnest(verdicts) AS said FROM group_scored
            UNION ALL SELECT project, model, "at", unnest(verdicts) AS said FROM rollout_compared
          )
          UNION ALL BY NAME
          SELECT project, model, "at", coalesce(metrics['gpu_s'], metrics['step_s']) AS train_gpu_s
          FROM policy_checkpoint
          UNION ALL BY NAME SELECT project, model, "at", serve_gpu_s FROM calls
          UNION ALL BY NAME SELECT project, model, "at", sampled_tokens FROM rollout_completed
        ), steps AS (
          SELECT project, model, version, step, "at" FROM policy_checkpoint WHERE branch = 'main'
        ), each AS (
          SELECT p.project, p.model, s.version, s.step, any_value(s."at") AS published_at,
            coalesce(sum(p.judge_usd), 0) AS judge_usd, coalesce(sum(p.train_gpu_s), 0) AS train_gpu_s,
            coalesce(sum(p.serve_gpu_s), 0) AS serve_gpu_s, coalesce(sum(p.sampled_tokens), 0)::BIGINT AS sampled_tokens
          FROM spent p ASOF LEFT JOIN steps s
            ON p.project = s.project AND p.model = s.model AND p."at" <= s."at"
          GROUP BY p.project, p.model, s.version, s.step
        ), measured AS (
          SELECT project, model, last_step AS step, 0 AS rank, avg(reward) AS held_out FROM rewards
          WHERE split = 'val' AND branch = 'main' AND outcome = 'scored' AND first_step = last_step GROUP BY ALL
          UNION ALL
          SELECT project, model, split_part(version, '@', 2)::INTEGER, 1, arg_max(mean, evaluated_at) FROM (
            FROM evaluations WHERE measure = 'reward' AND kind = 'policy' AND version <> ''
            QUALIFY scenarios = first_value(scenarios) OVER (PARTITION BY project, model ORDER BY evaluated_at DESC)
          ) GROUP BY ALL
        ), measured_with_first AS (
          SELECT *, first_value(held_out) OVER (PARTITION BY project, model ORDER BY rank, step) AS first_of_all
          FROM measured QUALIFY rank = min(rank) OVER (PARTITION BY project, model)
        )
        SELECT e.project, e.model, e.version, e.step, e.published_at, e.judge_usd, e.train_gpu_s, e.serve_gpu_s,
          e.sampled_tokens, sum(e.judge_usd) OVER so_far AS total_usd,
          sum(e.train_gpu_s + e.serve_gpu_s) OVER so_far AS total_gpu_s,
          (sum(e.sampled_tokens) OVER so_far)::BIGINT AS total_tokens, h.held_out, h.held_out - h.first_of_all AS gain
        FROM each e LEFT JOIN measured_with_first h USING (project, model, step)
        WINDOW so_far AS (PARTITION BY e.project, e.model ORDER BY e.step NULLS LAST)
        """,
)

UTILIZATION = View(
    "utilization",
    "Who waits for whom: one row per step of branch `main`, for the time since the step before.",
    {
        "seconds": "Seconds since the step before was published.",
        "training": "Share of this time in which the trainer trained.",
        "sampling": "Share of this time in which an inference server answered a call, by the ends of the calls.",
        "bound_by": "`sampling` or `training`, whichever share is larger; `agents` where both are below "
        f"{BUSY:g}: then sampler and trainer wait for agents, tools or the judge.",
    },
    f"""
        WITH calls AS (
          {_answering("project, model", "answered_s")}
        ), steps AS (
          SELECT project, model, version, step, published_at, started_at,
            lag(published_at) OVER (PARTITION BY project, model ORDER BY step) AS since
          FROM checkpoints WHERE branch = 'main'
        ), timed AS (
          SELECT s.project, s.model, s.version, s.step, epoch_us(any_value(s.published_at - s.since)) / 1e6 AS seconds,
            epoch_us(any_value(s.published_at - greatest(s.started_at, s.since))) / 1e6 AS trained_s,
            coalesce(sum(c.answered_s), 0) AS answered_s
          FROM steps s LEFT JOIN calls c
            ON c.project = s.project AND c.model = s.model AND c."at" > s.since AND c."at" <= s.published_at
          WHERE s.published_at > s.since GROUP BY ALL
        ), shares AS (
          SELECT project, model, version, step, seconds, least(1, trained_s / seconds) AS training,
            least(1, answered_s / seconds) AS sampling
          FROM timed
        )
        SELECT *, CASE WHEN greatest(training, sampling) < {BUSY} THEN 'agents'
          WHEN sampling >= training THEN 'sampling' ELSE 'training' END AS bound_by
        FROM shares
        """,
)

SOLVED = 0.5
"""The least final reward of a run that counts as solved."""

COSTS = View(
    "costs",
    "What runs cost, whoever answered: one row per model, version, task, day and outcome. A run whose calls were "
    "answered by several versions counts in the row of each.",
    {
        "version": "`<model>@<step>`, or `outside:<name>` where a provider's model answered.",
        "outcome": "`scored`, `no_result` or `masked`; `open` while the run has not ended.",
        "solved": f"Number of scored runs whose final reward is {SOLVED} or more.",
        "input_tokens": "Tokens of the prompts, cached ones included; of a provider by its own count.",
        "gpu_s": "Seconds of inference servers that answered them. Calls that a server answers at the same time share "
        "its seconds.",
        "cost_usd": "What providers charged, and `gpu_s` at the price `store.gpu_usd_h`. `spending` has the hours of "
        "training and of shadow calls.",
        "unpriced": "Calls of providers without a known cost: they failed, broke off or told no usage.",
        "usd_per_solved": "`cost_usd` per solved run; null where none is.",
        "tokens_per_solved": "Input and output tokens per solved run; null where none is.",
    },
    f"""
        WITH spent AS (
          SELECT project, model, trajectory, policy_version AS version, count(*) FILTER (choice = 0) AS calls,
            sum(CASE WHEN step < 0 THEN input_tokens WHEN choice = 0 THEN len(prompt_ids) ELSE 0 END) AS input_tokens,
            sum(cached_tokens) AS cached_tokens,
            sum(CASE WHEN step < 0 THEN output_tokens ELSE len(sampled_ids) END) AS output_tokens,
            coalesce(sum(cost_usd), 0) AS cost_usd,
            count(*) FILTER (step < 0 AND choice = 0 AND cost_usd IS NULL) AS unpriced
          FROM rollout_exchange WHERE copied_from = '' GROUP BY ALL
        ), {_SERVED}, {_FINAL}, summed AS (
          SELECT s.project, s.model, s.version, t.task, t.opened_at::DATE AS day, t.outcome, count(*) AS runs,
            count(*) FILTER (t.outcome = 'scored' AND coalesce(f.reward, t.reward) >= {SOLVED}) AS solved,
            sum(s.calls)::BIGINT AS calls, sum(s.input_tokens)::BIGINT AS input_tokens,
            sum(s.cached_tokens)::BIGINT AS cached_tokens, sum(s.output_tokens)::BIGINT AS output_tokens,
            coalesce(sum(v.gpu_s), 0) AS gpu_s,
            sum(s.cost_usd) + coalesce(sum(v.gpu_s), 0) * {GPU_USD_S} AS cost_usd, sum(s.unpriced)::BIGINT AS unpriced
          FROM spent s JOIN trajectories t USING (project, trajectory)
          LEFT JOIN served v USING (project, trajectory, version) LEFT JOIN final f USING (project, trajectory)
          GROUP BY ALL
        )
        SELECT *, cost_usd / nullif(solved, 0) AS usd_per_solved,
          (input_tokens + output_tokens) / nullif(solved, 0) AS tokens_per_solved
        FROM summed
        """,
    sources=(ExchangeRecorded,),
)

TAKEOVERS = View(
    "takeovers",
    "One row per run that an agent opened under the name of an outside model about which there is a decision: who "
    "answered, what came of it, what it cost.",
    {
        "model": "Name of the outside model.",
        "side": "`apprentice` or `master`: whose run it is, from its opening on.",
        "version": "The apprentice's version that a decision gave the run; null if none.",
        "reward": "The final reward of a scored run; null where none is known.",
        "apprentice_calls": "Those that the apprentice answered.",
        "unsure_calls": "Answers of the apprentice that were not shown, because its mean logprob was too low.",
        "instead_calls": "Calls that the master answered in a run of the apprentice: it was unsure, or did not answer.",
        "cost_usd": "What providers charged, and the time of inference servers at the price `store.gpu_usd_h`.",
    },
    f"""
        WITH names AS (SELECT DISTINCT project, asked AS name FROM rollout_opened WHERE asked <> ''), {_SERVED},
        own AS (
          SELECT project, trajectory, sum(gpu_s) AS gpu_s FROM served GROUP BY ALL
        ), said AS (
          SELECT project, trajectory, count(*) FILTER (status = 'complete') AS calls,
            count(*) FILTER (status = 'complete' AND step >= 0) AS apprentice_calls,
            count(*) FILTER (status = 'unsure') AS unsure_calls,
            count(*) FILTER (status = 'complete' AND step < 0) AS master_calls,
            coalesce(sum(cost_usd), 0) AS cost_usd
          FROM rollout_exchange WHERE choice = 0 AND copied_from = '' GROUP BY ALL
        ), {_FINAL}
        SELECT n.project, n.name AS model, if(o.model = n.name, 'master', 'apprentice') AS side,
          nullif(o.pinned, '') AS version, o.trajectory, t.task, t.group_id, t.split, t.outcome,
          if(t.outcome = 'scored', coalesce(f.reward, t.reward), NULL) AS reward, coalesce(s.calls, 0) AS calls,
          coalesce(s.apprentice_calls, 0) AS apprentice_calls, coalesce(s.unsure_calls, 0) AS unsure_calls,
          if(o.model = n.name, 0, coalesce(s.master_calls, 0)) AS instead_calls,
          coalesce(s.cost_usd, 0) + coalesce(own.gpu_s, 0) * {GPU_USD_S} AS cost_usd, t.opened_at
        FROM rollout_opened o JOIN trajectories t USING (project, trajectory)
        LEFT JOIN said s USING (project, trajectory) LEFT JOIN own USING (project, trajectory)
        LEFT JOIN final f USING (project, trajectory)
        JOIN names n ON n.project = o.project AND n.name = coalesce(nullif(o.asked, ''), o.model)
        """,
    sources=(TrajectoryOpened, ExchangeRecorded),
)

VIEWS = (SPENDING, UTILIZATION, COSTS, TAKEOVERS)
