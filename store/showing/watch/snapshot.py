"""Collects the present figures of a run: from the store, from `state.json` (processes), and the lag on the log."""

# ruff: noqa: S608 - the only text put into SQL here is a constant of this module

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipeline import streams
from pipeline.config import Config
from pipeline.log.broker import Broker
from store.reading.alarms import alarms_of
from store.reading.history import History
from store.reading.state import state_of

RATE_S = 60
"""Window of rates in seconds."""
_OPEN_S = 3600
"""Groups and runs that were opened more than this many seconds ago do not count as open."""
_CURVE = 400
"""Number of newest steps whose rewards are shown."""

_TOTALS = f"""SELECT
  (SELECT count(*) FROM rollout_completed WHERE "at" > $now - to_seconds({RATE_S})) / {RATE_S} AS runs_per_s,
  (SELECT count(*) FROM rollout_exchange WHERE "at" > $now - to_seconds({RATE_S})) / {RATE_S} AS calls_per_s,
  (SELECT count(*) FROM dead_letter) AS dead_letters,
  (SELECT sum(cost_usd) FROM judge_cost) AS judge_usd"""

_OPEN = f"""WITH opened AS (
  SELECT project, trajectory, "group" AS group_id FROM rollout_opened WHERE "at" > $now - to_seconds({_OPEN_S})
), ended AS (
  SELECT project, trajectory FROM rollout_completed WHERE "at" > $now - to_seconds({_OPEN_S})
), decided AS (
  SELECT project, "group" AS group_id FROM group_scored WHERE "at" > $now - to_seconds({_OPEN_S})
  UNION ALL SELECT project, "group" FROM group_discarded WHERE "at" > $now - to_seconds({_OPEN_S})
)
SELECT (SELECT count(*) FROM opened ANTI JOIN ended USING (project, trajectory)) AS open_runs,
  (SELECT count(DISTINCT (project, group_id)) FROM opened ANTI JOIN decided USING (project, group_id)) AS open_groups"""

_STEPS = f"""SELECT model, step, version, metrics FROM checkpoints WHERE branch = 'main'
QUALIFY row_number() OVER (PARTITION BY model ORDER BY step DESC) <= {_CURVE} ORDER BY model, step"""

_HELD = """WITH changed AS (
  SELECT model, replica, version, step, log_seq, true AS is_held FROM policy_loaded
  UNION ALL SELECT model, replica, version, NULL, log_seq, false FROM policy_unloaded
), latest AS (
  SELECT model, replica, version, max(step) AS step, arg_max(is_held, log_seq) AS is_held FROM changed GROUP BY ALL
)
SELECT model, replica, arg_max(version, step) AS version FROM latest WHERE is_held GROUP BY ALL ORDER BY ALL"""


@dataclass(frozen=True)
class Model:
    """One policy."""

    name: str
    step: int = 0
    version: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    """Mean rewards of the newest steps, oldest first."""


@dataclass(frozen=True)
class Snapshot:
    """The figures that `store.showing.watch.view` shows."""

    run_dir: str
    at: datetime
    running: bool
    """Whether the supervisor of the run is running."""
    urls: dict[str, str]
    services: dict[str, str]
    """State of each process."""
    supervisor_alarms: tuple[str, ...] = ()
    runs_per_s: float = 0.0
    calls_per_s: float = 0.0
    open_runs: int = 0
    open_groups: int = 0
    dead_letters: int = 0
    judge_usd: float = 0.0
    lag: dict[str, int] | None = None
    """By service, the number of events that its consumers have not acknowledged; `None` if the log does not answer."""
    models: tuple[Model, ...] = ()
    replicas: tuple[tuple[str, str], ...] = ()
    """Each replica with the newest version of each model that it holds, as one text."""
    alarms: tuple[dict[str, Any], ...] = ()
    """As `store.reading.alarms_of` returns them."""


def take_snapshot(history: History, lag: dict[str, int] | None, now: datetime | None = None) -> Snapshot:
    """Return the present figures. `lag`: as in `Snapshot`. `now`: the time to use instead of the present one. Blocks.
    Raises `StoreError`, `duckdb.Error`."""
    config = history.config
    state = state_of(config)
    at = (now or datetime.now(UTC)).replace(tzinfo=None)
    totals = history.row(_TOTALS, {"now": at}) or {}
    opened = history.row(_OPEN, {"now": at}) or {}
    return Snapshot(
        run_dir=str(config.run_dir),
        at=at,
        running=bool(state.running),
        urls=state.urls,
        services=state.services,
        supervisor_alarms=state.alarms,
        runs_per_s=totals.get("runs_per_s") or 0.0,
        calls_per_s=totals.get("calls_per_s") or 0.0,
        open_runs=opened.get("open_runs") or 0,
        open_groups=opened.get("open_groups") or 0,
        dead_letters=totals.get("dead_letters") or 0,
        judge_usd=totals.get("judge_usd") or 0.0,
        lag=lag,
        models=_models(config, history.rows(_STEPS)),
        replicas=_replicas(config, history.rows(_HELD)),
        alarms=tuple(alarms_of(history)),
    )


async def log_lag(broker: Broker) -> dict[str, int]:
    """The events that each service's consumers have not acknowledged. Raises `BrokerError`."""
    services = dict.fromkeys(spec.name.partition("-")[0] for spec in streams.CONSUMERS)
    return {service: await broker.lag(service) for service in services}


def _models(config: Config, steps: Sequence[dict[str, Any]]) -> tuple[Model, ...]:
    found: dict[str, list[dict[str, Any]]] = {model.name: [] for model in config.models}
    for row in steps:
        found.setdefault(row["model"], []).append(row)
    return tuple(_model(name, rows) for name, rows in found.items())


def _model(name: str, rows: Sequence[dict[str, Any]]) -> Model:
    if not rows:
        return Model(name, version=f"{name}@0")
    metrics = [row["metrics"] or {} for row in rows]
    rewards = [m.get("reward_mean_all", m.get("reward_mean")) for m in metrics]
    return Model(
        name, rows[-1]["step"], rows[-1]["version"], metrics[-1], tuple(r for r in rewards if r is not None)
    )


def _replicas(config: Config, held: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The replicas of the settings first; those that are in events only if the settings name none."""
    found = {
        url.partition("://")[2].rstrip("/"): list[str]()
        for url in config.sampler.advertise or config.vllm.urls
    }
    for row in held:
        if row["replica"] in found or not config.vllm.urls:
            found.setdefault(row["replica"], []).append(row["version"])
    return tuple((replica, ", ".join(versions) or "base model") for replica, versions in found.items())
