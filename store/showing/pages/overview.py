"""Overview and compare: the curves of an installation, its counts, evaluations, decisions and alarms."""

from __future__ import annotations

from typing import Any

from store.showing.pages.errors import PageError
from store.showing.pages.history import History
from store.showing.pages.intervals import SAMPLE, with_intervals
from store.showing.pages.lists import Query, branch_of
from store.showing.pages.summary import summary

_POINTS = 400
"""Points of a curve at most; more steps are averaged."""
_BUCKETS = 120
"""Points of a curve over time, about."""
_LATEST = 10

_REWARD = f"""
    WITH scored AS (
      SELECT last_step // $width * $width AS step, split, group_id, count(*) AS runs, avg(reward) AS "value"
      FROM rewards
      WHERE outcome = 'scored' AND model = $model AND branch = $branch AND isfinite(reward) GROUP BY ALL
    )
    SELECT step, split, sum(runs)::BIGINT AS trajectories, {SAMPLE} FROM scored GROUP BY ALL ORDER BY step, split
"""  # noqa: S608
_STEPS = """
    SELECT step // $width * $width AS step, arg_max(version, step) AS version,
      arg_max(published_at, step) AS published_at, arg_max(metrics, step) AS metrics,
      avg(epoch_us(published_at - started_at) / 1e6) AS duration_s
    FROM checkpoints WHERE model = $model AND branch = $branch GROUP BY 1 ORDER BY 1
"""
_STALENESS = """
    SELECT step // $width * $width AS step, avg(staleness_max) AS mean, max(staleness_max) AS highest,
      avg(wait_s) AS wait_s
    FROM staleness WHERE model = $model AND branch = $branch GROUP BY 1 ORDER BY 1
"""
_UTILIZATION = """
    SELECT step // $width * $width AS step, sum(sampling * seconds) / sum(seconds) AS sampling,
      sum(training * seconds) / sum(seconds) AS training
    FROM utilization WHERE model = $model GROUP BY 1 ORDER BY 1
"""
_SPAN = """
    SELECT epoch(min("at"))::BIGINT AS began, epoch(max("at"))::BIGINT AS ended FROM rollout_completed
    WHERE model = $model
"""
_THROUGHPUT = """
    SELECT epoch("at")::BIGINT // $seconds * $seconds AS "at", count(*) / $seconds AS trajectories_per_s,
      sum(sampled_tokens) / $seconds AS tokens_per_s
    FROM rollout_completed WHERE model = $model GROUP BY 1 ORDER BY 1
"""
_METRIC_NAMES = """
    SELECT name FROM (
      SELECT unnest(map_keys(metrics)) AS name FROM rollout_completed WHERE model = $model AND cardinality(metrics) > 0
    ) GROUP BY name ORDER BY count(*) DESC, name LIMIT 24
"""
"""Of the metrics that agents gave to runs, the most frequent first."""
_METRICS = f"""
    WITH each AS (
      SELECT last_step // $width * $width AS step, split, coalesce(nullif("group", ''), trajectory) AS group_id,
        unnest(map_entries(metrics)) AS m
      FROM rollout_completed WHERE model = $model AND outcome = 'scored' AND cardinality(metrics) > 0
    ), by_group AS (
      SELECT m.key AS name, step, split, group_id, avg(m.value) AS "value" FROM each
      WHERE isfinite(m.value) GROUP BY ALL
    )
    SELECT name, step, split, {SAMPLE} FROM by_group GROUP BY ALL ORDER BY name, step, split
"""  # noqa: S608
_SPENDING = """
    SELECT max(step) AS step, max(total_usd) AS total_usd, max(total_gpu_s) / 3600 AS total_gpu_hours,
      max(total_tokens) AS total_tokens, arg_max(gain, step) FILTER (gain IS NOT NULL) AS gain
    FROM spending WHERE model = $model AND step IS NOT NULL GROUP BY step // $width ORDER BY 1
"""
_SPENT = """
    WITH total AS (
      SELECT max(total_usd) AS judge_usd, max(total_gpu_s) / 3600 AS gpu_hours, max(total_tokens) AS sampled_tokens,
        arg_max(gain, step) FILTER (gain IS NOT NULL) AS gain
      FROM spending WHERE model = $model
    )
    UNPIVOT (SELECT judge_usd, gpu_hours, sampled_tokens::DOUBLE AS sampled_tokens, gain FROM total)
      ON judge_usd, gpu_hours, sampled_tokens INTO NAME setting VALUE spent
"""
"""What the model cost so far by each setting of `[budget]`, and its gain on held-out tasks."""
_COUNTS = """
    SELECT
      (SELECT count(*) FROM rollout_opened WHERE model = $model) AS opened,
      (SELECT count(*) FROM rollout_completed WHERE model = $model) AS completed,
      (SELECT count(*) FROM rollout_exchange WHERE model = $model) AS calls,
      (SELECT count(*) FROM group_scored WHERE model = $model AND branch = $branch) AS groups,
      (SELECT count(*) FROM group_discarded WHERE model = $model AND branch = $branch) AS discarded,
      (SELECT max(step) FROM policy_checkpoint WHERE model = $model AND branch = $branch) AS steps,
      (SELECT count(*) FROM dead_letter) AS dead,
      (SELECT sum(list_sum([verdict.cost_usd FOR verdict IN verdicts])) FROM group_scored WHERE model = $model)
        AS judge_cost_usd
"""
_DISCARDS = """
    SELECT CASE WHEN d.split = 'val' THEN 'validation'
        WHEN d.reason IN ('too_small', 'unscored') AND c.outcome <> 'scored' THEN c.outcome ELSE d.reason END AS reason,
      count(*) AS groups
    FROM group_discarded d LEFT JOIN rollout_completed c
      ON c.project = d.project AND c.trajectory = d.trajectories[1]
    WHERE d.model = $model AND d.branch = $branch GROUP BY 1 ORDER BY 2 DESC, 1
"""
"""Groups that were not to be trained (held out, masked, without a result) are counted apart."""


def models(history: History) -> list[str]:
    """Return the names of the installation's models: those of the settings that have events, then others with events,
    then the rest."""
    named = [model.name for model in history.config.models]
    rows = history.shared_rows(
        "SELECT DISTINCT model FROM policy_checkpoint UNION SELECT DISTINCT model FROM rollout_opened"
    )
    seen = {row["model"] for row in rows}
    return list(dict.fromkeys([*(name for name in named if name in seen), *sorted(seen), *named]))


def branches(history: History) -> list[str]:
    """Return the branches of a run, `main` first."""
    rows = history.shared_rows(
        "SELECT DISTINCT branch FROM group_scored UNION SELECT DISTINCT branch FROM policy_checkpoint"
    )
    return list(dict.fromkeys(["main", *sorted(row["branch"] for row in rows)]))


def overview(history: History, query: Query) -> dict[str, Any]:
    """Return the page of an installation: its `numbers`, what it cost, and the latest evaluations and decisions."""
    data = numbers(history, query)
    return {
        **data,
        "branches": branches(history),
        "spent": [
            {**row, "limit": getattr(history.config.budget, row["setting"]) or None}
            for row in history.shared_rows(_SPENT, data)
        ],
        "run_metrics": [row["name"] for row in history.shared_rows(_METRIC_NAMES, data)],
        "evaluations": history.rows(
            f"""SELECT * FROM evaluations WHERE measure = 'reward' AND (model = $model OR kind = 'external')
                ORDER BY evaluated_at DESC, position LIMIT {_LATEST}""",  # noqa: S608
            data,
        ),
        "decisions": history.rows(
            f'SELECT * FROM policy_promoted WHERE model = $model ORDER BY "at" DESC LIMIT {_LATEST // 2}',  # noqa: S608
            data,
        ),
    }


def with_curves(history: History, query: Query) -> dict[str, Any]:
    """Return the overview with its curves: the page's JSON, of which its script draws them."""
    return {**overview(history, query), **curves(history, query)}


def numbers(history: History, query: Query) -> dict[str, Any]:
    """Return the part of the overview that a page reloads while the run is running: the run in sentences, alarms,
    counts, and discards by reason."""
    selection = selection_of(history, query)
    return {
        **selection,
        "counts": history.shared_rows(_COUNTS, selection)[0],
        "discards": history.shared_rows(_DISCARDS, selection),
        "summary": summary(history, selection),
    }


def selection_of(history: History, query: Query) -> dict[str, Any]:
    """Return the model and branch of the address, or the first ones, and the models that there are. Raises a 404
    `PageError` for a model or branch that the history does not have."""
    names, branch = models(history), branch_of(query)
    model = query.get("model") or (names[0] if names else "")
    for kind, name, known in (("model", model, names), ("branch", branch, branches(history))):
        if name and name not in known:
            message = f"There is no {kind} {name[:80]!r} in this history; there are: {', '.join(known) or 'none'}."
            raise PageError(404, message)
    return {"model": model, "branch": branch, "models": names}


def curves(history: History, query: Query) -> dict[str, Any]:
    """Return the counts and curves of one model and branch, for the overview and for compare."""
    selection = selection_of(history, query)
    counts = history.shared_rows(_COUNTS, selection)[0]
    selection["width"] = 1 + (counts["steps"] or 0) // _POINTS
    (span,) = history.shared_rows(_SPAN, selection)
    selection["seconds"] = max(1, ((span["ended"] or 0) - (span["began"] or 0)) // _BUCKETS)
    steps = history.shared_rows(_STEPS, selection)
    return {
        **selection,
        "counts": counts,
        "curve": with_intervals(history.shared_rows(_REWARD, selection)),
        "steps": [{**row, "metrics": row["metrics"] or {}} for row in steps],
        "staleness": history.shared_rows(_STALENESS, selection),
        "throughput": history.shared_rows(_THROUGHPUT, selection),
        "utilization": history.shared_rows(_UTILIZATION, selection) if selection["branch"] == "main" else [],
        "spending": history.shared_rows(_SPENDING, selection),
        "metrics": with_intervals(history.shared_rows(_METRICS, selection)),
    }
