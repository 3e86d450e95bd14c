"""Evaluates the alarms' queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING

import duckdb

from pipeline.config import Config
from store.alarms.table import ALARMS, PARAMETER, Alarm

if TYPE_CHECKING:
    from pipeline.log.health import Fill  # pages read alarms without the log
    from pipeline.log.unwritten import Unwritten


@dataclass(frozen=True)
class Found:
    """A thing that an alarm holds for."""

    alarm: str
    project: str
    model: str
    about: str
    value: float
    threshold: float
    detail: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it the same alarm at the next check."""
        return self.alarm, self.project, self.model, self.about


def threshold(config: Config, alarm: Alarm) -> float:
    """The value of the alarm's setting."""
    return float(attrgetter(alarm.setting)(config))


def measured_tables(
    connection: duckdb.DuckDBPyConnection,
    config: Config,
    fills: Sequence[Fill],
    unwritten: Sequence[Unwritten] = (),
) -> None:
    """Create the tables `fills`, `unwritten` and `replicas`, which hold what no event says."""
    connection.execute(
        'CREATE OR REPLACE TEMP TABLE fills (name VARCHAR, kind VARCHAR, bytes BIGINT, "limit" BIGINT)'
    )
    for fill in fills:
        if not fill.limit:
            continue
        connection.execute(
            "INSERT INTO fills VALUES (?, ?, ?, ?)", [fill.name, fill.kind, fill.bytes, fill.limit]
        )
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE unwritten (consumer VARCHAR, share DOUBLE, detail VARCHAR)"
    )
    for one in unwritten:
        connection.execute("INSERT INTO unwritten VALUES (?, ?, ?)", [one.consumer, one.share, one.detail])
    connection.execute("CREATE OR REPLACE TEMP TABLE replicas (replica VARCHAR)")
    for url in config.sampler.advertise or config.vllm.urls:
        connection.execute("INSERT INTO replicas VALUES (?)", [url.partition("://")[2].rstrip("/")])


def evaluate(
    connection: duckdb.DuckDBPyConnection, config: Config, alarm: Alarm, now: datetime | None = None
) -> list[Found]:
    """Run the query of `alarm`. `connection` has the store's views and the tables of `measured_tables`; `now` is a time
    in UTC, the present if it is `None`. Raises `duckdb.Error`."""
    compared = threshold(config, alarm)
    values = {
        "threshold": compared,
        "now": (now or datetime.now(UTC)).replace(tzinfo=None),
        "steps": config.alarms.steps,
        "groups": config.alarms.groups,
        "window_s": config.alarms.window_s,
    }
    used = set(PARAMETER.findall(alarm.sql))
    rows = connection.execute(alarm.sql, {n: v for n, v in values.items() if n in used}).fetchall()
    return [
        Found(alarm.name, project or config.project, model, about, _finite(value), compared, detail)
        for project, model, about, value, detail in rows
    ]


def evaluate_all(connection: duckdb.DuckDBPyConnection, config: Config) -> list[Found]:
    """Run the queries of all alarms. Raises `duckdb.Error`."""
    return [found for alarm in ALARMS for found in evaluate(connection, config, alarm)]


def _finite(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else 0.0
