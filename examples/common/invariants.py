"""Queries for what must never be in a run's history. Each returns the number of its findings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from examples.common.history import rows
from examples.common.running import ExampleError

NEVER: dict[str, str] = {
    # Calls of training runs follow the newest version; those of evaluations are pinned to one.
    "a call answered by an older version than a call that had ended when it began": """
        WITH calls AS (SELECT * FROM exchanges WHERE group_id LIKE 'train-%' AND status = 'complete'),
        done AS (SELECT model, ended_at, max(step) OVER (
            PARTITION BY model ORDER BY ended_at ROWS UNBOUNDED PRECEDING) AS newest FROM calls)
        SELECT count(*) FROM calls c ASOF JOIN done d ON c.model = d.model AND c.started_at >= d.ended_at
        WHERE c.step < d.newest""",
    "an older version after a newer one in the calls of a run": """
        SELECT count(*) FROM (SELECT step, lag(step) OVER (PARTITION BY trajectory ORDER BY seq, choice) AS before
            FROM exchanges WHERE status = 'complete') WHERE step < before""",
    "a call of an evaluation answered by another version than the pinned one": """
        SELECT count(*) FROM (SELECT 1 FROM exchanges e JOIN trajectories t USING (project, trajectory)
            WHERE t.split = 'val' GROUP BY t.trajectory HAVING count(DISTINCT e.policy_version) > 1)""",
    "a call answered by a version before the version was published": """
        SELECT count(*) FROM exchanges e JOIN checkpoints c ON e.policy_version = c.version
        WHERE e.ended_at < c.published_at""",
    "a call at a server that had not loaded its version": """
        SELECT count(*) FROM exchanges e WHERE e.step > 0 AND e.status = 'complete' AND NOT EXISTS (
            FROM adapters a
            WHERE a.version = e.policy_version AND a.replica = e.replica AND a.loaded_at <= e.ended_at)""",
    "a call whose version is not that of its model and step": """
        SELECT count(*) FROM exchanges WHERE step >= 0 AND policy_version <> model || '@' || step""",
    "a call that an outside model answered, with tokens that could be trained": """
        SELECT count(*) FROM exchanges WHERE policy_version LIKE 'outside:%' AND (step >= 0 OR len(sampled_ids) > 0)""",
    "a call trained in two checkpoints of a branch under one verdict set, or twice in one": """
        SELECT count(*) FROM (SELECT 1 FROM lineage WHERE seq IS NOT NULL
            GROUP BY project, model, branch, judge, trajectory, seq, choice HAVING count(*) > 1)""",
    "a run trained in two checkpoints of a branch under one verdict set": """
        SELECT count(*) FROM (SELECT 1 FROM lineage
            GROUP BY project, model, branch, judge, trajectory HAVING count(DISTINCT version) > 1)""",
    "a call of an evaluation that was trained": """
        SELECT count(*) FROM lineage l JOIN trajectories t USING (project, trajectory) WHERE t.split = 'val'""",
    "a call that did not end and was trained": """
        SELECT count(*) FROM lineage l JOIN exchanges e USING (project, trajectory, seq, choice)
        WHERE e.status <> 'complete'""",
    "a trained call that is as new as its checkpoint, or newer": "SELECT count(*) FROM lineage WHERE staleness < 0",
    "a checkpoint whose parent is not the step before it": """
        SELECT count(*) FROM checkpoints WHERE branch = 'main' AND parent <> model || '@' || (step - 1)""",
    "a version that a server loaded with another adapter than the published one": """
        SELECT count(*) FROM adapters WHERE NOT digest_matches""",
    "a loaded version that changes no logprob": "SELECT count(*) FROM adapters WHERE probe_delta = 0",
    "a call that ended before it began, or began before its run was opened": """
        SELECT count(*) FROM exchanges e JOIN trajectories t USING (project, trajectory)
        WHERE e.ended_at < e.started_at OR e.started_at < t.opened_at""",
    "a call of a run that had been completed": """
        SELECT count(*) FROM exchanges e JOIN trajectories t USING (project, trajectory)
        WHERE e.started_at > t.completed_at""",
    "a complete call without a token, or with another number of logprobs than tokens": """
        SELECT count(*) FROM exchanges WHERE step >= 0 AND (len(sampled_ids) <> len(logprobs)
            OR (status = 'complete' AND (len(sampled_ids) = 0 OR len(prompt_ids) = 0)))""",
    "a logprob above 0, or one that is no number": """
        SELECT count(*) FROM (SELECT unnest(logprobs) AS logprob FROM exchanges)
        WHERE logprob > 0 OR NOT isfinite(logprob)""",
    "a reward or a score outside of -1 to 1, the range of rewards in the examples": """
        SELECT (SELECT count(*) FROM rewards WHERE NOT reward BETWEEN -1 AND 1)
            + (SELECT count(*) FROM verdicts WHERE NOT score BETWEEN -1 AND 1)""",
    "a run whose calls are not numbered from 0 without a gap, or of which some are missing": """
        SELECT count(*) FROM (SELECT t.trajectory FROM trajectories t LEFT JOIN exchanges e USING (project, trajectory)
            WHERE t.completed_at IS NOT NULL GROUP BY t.trajectory, t.exchanges
            HAVING count(e.seq) <> any_value(t.exchanges) OR coalesce(max(e.seq) + 1, 0) <> count(DISTINCT e.seq))""",
    "two calls of a run with one number": """
        SELECT count(*) FROM (SELECT 1 FROM exchanges GROUP BY project, trajectory, seq, choice HAVING count(*) > 1)""",
    "a run in two groups, or scored twice by one judge": """
        SELECT count(*) FROM (SELECT 1 FROM rewards GROUP BY project, branch, judge, trajectory HAVING count(*) > 1)""",
    "a scored group of another size than the judge waits for": """
        SELECT count(*) FROM (
          SELECT g.*, coalesce(nullif(o.named, 0), mode(size) OVER (PARTITION BY g.model)) AS usual FROM groups g
          LEFT JOIN (SELECT project, "group" AS group_id, max(group_size) AS named FROM rollout_opened GROUP BY ALL) o
            USING (project, group_id)
          WHERE split = 'train'
        ) WHERE status = 'scored' AND closed_by = 'size' AND size <> usual""",
    "a message that could not be handled": "SELECT count(*) FROM dead",
}
"""What must not be in a history. The first is for one gateway: several learn of a load at slightly different times."""


def counting(queries: dict[str, str]) -> str:
    """Return a query with a row for each of `queries`: its name in `finding`, its result in `count`."""
    return " UNION ALL ".join(f"SELECT '{name}' AS finding, ({query}) AS count" for name, query in queries.items())


def count_findings(run_dir: Path) -> dict[str, int]:
    """Return the number of findings of each query of `NEVER` over a run's history."""
    return {row["finding"]: row["count"] for row in rows(run_dir, counting(NEVER))}


def require_none(findings: Mapping[str, int]) -> None:
    """Raise `ExampleError` if a query of `count_findings` has findings."""
    if faults := [f"{count:,} times {name}" for name, count in findings.items() if count]:
        raise ExampleError("the history holds what it must not: " + "; ".join(faults))
