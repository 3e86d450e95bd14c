"""Checkpoints, one checkpoint with its lineage both ways, and decisions about versions."""

from __future__ import annotations

from typing import Any

from store.showing.pages.errors import PageError
from store.showing.pages.groups import add_tasks
from store.showing.pages.history import History
from store.showing.pages.intervals import SAMPLE, with_intervals
from store.showing.pages.lists import Query, as_step, branch_of, list_page
from store.showing.pages.overview import models

_COLUMNS = {
    "published": "published_at",
    "step": "step",
    "version": "version",
    "branch": "branch",
    "parent": "parent",
    "groups": "groups",
    "loss": "metrics['loss']",
    "kl": "metrics['kl']",
    "entropy": "metrics['entropy']",
    "reward": "coalesce(metrics['reward_mean_all'], metrics['reward_mean'])",
}
_CHECKPOINTS = """(
    SELECT model, version, step, branch, parent, len(groups) AS groups, "at" AS published_at, metrics,
      log_seq AS stream_seq
    FROM policy_checkpoint)
"""
_SAMPLED = f"""
    WITH by_group AS (
      SELECT split, group_id, count(*) AS runs, avg(reward) AS "value" FROM rewards
      WHERE outcome = 'scored' AND first_step = $step AND last_step = $step AND model = $model AND branch = 'main'
      GROUP BY ALL
    )
    SELECT split, sum(runs)::BIGINT AS trajectories, {SAMPLE} FROM by_group GROUP BY split ORDER BY split
"""  # noqa: S608
_LEARNED = """
    WITH learned AS (
      SELECT project, model, unnest(groups) AS group_id, unnest(group_seqs) AS seq FROM checkpoints
      WHERE version = $version AND branch = $branch
    )
    SELECT l.* EXCLUDE (seq), g.task, g.branch, g.size, g.reward_mean, g.reward_min, g.reward_max, g.decided_at
    FROM learned l LEFT JOIN groups g ON g.group_id = l.group_id AND g.stream_seq = l.seq AND g.status = 'scored'
    ORDER BY l.seq, l.group_id
"""
_VERSIONS = """
    SELECT model, version FROM checkpoints WHERE branch = 'main'
    QUALIFY row_number() OVER (PARTITION BY model ORDER BY step DESC) <= 200 ORDER BY model, step DESC
"""
"""Of each model the versions that a decision can choose, the newest first."""


def checkpoints(history: History, query: Query) -> dict[str, Any]:
    """Return the page of checkpoints, which `query` may filter by model and branch."""
    return list_page(history, query, _CHECKPOINTS, _COLUMNS, equal=("model", "branch"))


def checkpoint(history: History, name: str, query: Query) -> dict[str, Any]:
    """Return the page of a policy version: what it learned from, what it scored, who loaded it, and the decisions about
    it. Raises a 404 `PageError`."""
    model, _, number = name.rpartition("@")
    step = as_step(number)
    if step is None:
        raise PageError(404, f"{name[:80]!r} is no version: it is written <model>@<step>.")
    selection = {"version": name, "branch": branch_of(query), "step": step, "model": model}
    row = history.row("SELECT * FROM checkpoints WHERE version = $version AND branch = $branch", selection)
    sampled = with_intervals(history.rows(_SAMPLED, selection))
    children = history.rows(
        "SELECT version, branch FROM checkpoints WHERE parent = $version ORDER BY step, branch", selection
    )
    if row is None and not sampled and not children:
        raise PageError(404, f"There is no checkpoint {name!r} on branch {selection['branch']!r} of this history.")
    learned = history.rows(_LEARNED, selection)
    add_tasks(history, learned)
    return {
        **selection,
        "checkpoint": row,
        "sampled": sampled,
        "children": children,
        "learned": learned,
        "evaluations": history.rows(
            "SELECT * FROM evaluations WHERE version = $version ORDER BY evaluated_at DESC, measure LIMIT 50", selection
        ),
        "adapters": history.rows("SELECT * FROM adapters WHERE version = $version ORDER BY loaded_at", selection),
        "decisions": history.rows(
            'SELECT * FROM policy_promoted WHERE version = $version OR other = $version ORDER BY "at"', selection
        ),
    }


def decisions(history: History, query: Query) -> dict[str, Any]:
    """Return the page of the decisions about which version a model's name stands for, with the models and versions that
    a new one can be about."""
    source = "(SELECT *, log_seq AS stream_seq FROM policy_promoted)"
    columns = {"when": '"at"', "model": "model", "decision": "action", "version": "version", "by": '"by"'}
    return {
        **list_page(history, query, source, columns, equal=("model",)),
        "models": models(history),
        "versions": history.rows(_VERSIONS),
    }
