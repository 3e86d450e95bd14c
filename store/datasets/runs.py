"""The runs that a query selects, with their conversations and rewards."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import msgspec

from pipeline.chat.conversations import Conversation, build_conversations
from pipeline.config import ConfigError
from pipeline.events import ExchangeRecorded
from store.reading import rebuild, sql

_RUNS = """
    WITH scored AS (
      SELECT project, trajectory, arg_max(reward, scored_at) AS reward FROM rewards
      WHERE branch = 'main' AND outcome = 'scored' GROUP BY ALL
    )
    SELECT t.project, t.trajectory, t.model, coalesce(t.group_id, '') AS "group", coalesce(t.task, '') AS task, t.split,
      t.outcome, coalesce(s.reward, t.reward) AS reward
    FROM trajectories t LEFT JOIN scored s USING (project, trajectory)
    WHERE t.trajectory IN (SELECT * FROM unnest($names)) AND t.completed_at IS NOT NULL
    ORDER BY t.project, t.trajectory
"""
"""Of complete runs, the fields of `Run` that are not made of their calls."""
_CALLS = """
    SELECT * REPLACE ([]::INT[] AS prompt_ids, []::INT[] AS sampled_ids, []::FLOAT[] AS logprobs)
    FROM rollout_exchange WHERE trajectory IN (SELECT * FROM unnest($names)) ORDER BY project, trajectory, seq, choice
"""
"""Calls without their tokens, which no row needs."""


@dataclass(frozen=True)
class Run:
    """A run that is complete."""

    project: str
    trajectory: str
    group: str
    task: str
    model: str
    split: str
    """`train`, or `val` for a held-out run."""
    outcome: str
    reward: float | None
    """That of its newest verdict on `main`; else the one that its agent reported. A column `reward` of the query
    replaces it."""
    versions: tuple[str, ...]
    """The policy versions of its calls."""
    calls: tuple[bytes, ...]
    """Request and response of each call."""
    conversations: tuple[Conversation, ...]

    @property
    def group_key(self) -> tuple[str, str, str]:
        """Project, model and name of its group, within which rewards are compared."""
        return self.project, self.model, self.group

    @property
    def key(self) -> str:
        """The name of its task, which its split is chosen by: the same for all runs of one task."""
        return self.task or self.group or self.trajectory


def select(connection: duckdb.DuckDBPyConnection, query: str) -> list[Run]:
    """Return the complete runs whose ids a query returns in its column `trajectory`, by project and id.

    Raises `ConfigError` for a query without this column and for two rewards of one run, `duckdb.Error` for one that
    DuckDB refuses."""
    rows = sql.rows_of(connection.execute(query))
    if rows and "trajectory" not in rows[0]:
        raise ConfigError("the query returns no column `trajectory`: select the ids of runs")
    rewards: dict[str, float] = {}
    for row in rows:
        name, reward = row["trajectory"], row.get("reward")
        if reward is not None and rewards.setdefault(name, float(reward)) != float(reward):
            raise ConfigError(f"the query returns two rewards for run {name}: return one")
    names = sorted({row["trajectory"] for row in rows})
    calls: dict[tuple[str, str], list[ExchangeRecorded]] = {}
    for call in rebuild.events(ExchangeRecorded, connection.sql(_CALLS, params={"names": names}).to_arrow_table()):
        calls.setdefault((call.project, call.trajectory), []).append(call)
    runs = []
    for row in sql.rows_of(connection.execute(_RUNS, {"names": names})):
        own = calls.get((row["project"], row["trajectory"]), [])
        row["reward"] = rewards.get(row["trajectory"], row["reward"])
        versions = tuple(sorted({call.policy_version for call in own}))
        texts = tuple(msgspec.msgpack.encode((call.request, call.response)) for call in own)
        runs.append(Run(**row, versions=versions, calls=texts, conversations=build_conversations(own)[0]))
    return runs
