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
from pipeline.streams import replica_name
from pipeline.telemetry.logs import get_logger
from store.alarms.table import PARAMETER, Alarm

if TYPE_CHECKING:
    from pipeline.log.health import Fill  # pages read alarms without the log
    from pipeline.log.unwritten import Unwritten

logger = get_logger("store.alarms")


@dataclass(frozen=True)
class Condition:
    """A row of an alarm's query: its condition is met, for this model, server, consumer or stream."""

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
    damaged: Sequence[str] = (),
) -> None:
    """Create the tables that queries read beside the views: `fills` (of streams and the disk), `unwritten` (by
    consumer), `damaged` (paths of files of the lake) and `replicas` (inference servers)."""
    urls = config.sampler.advertise or config.vllm.urls
    for name, columns, rows in (
        (
            "fills",
            'name VARCHAR, kind VARCHAR, bytes BIGINT, "limit" BIGINT',
            [(fill.name, fill.kind, fill.bytes, fill.limit) for fill in fills if fill.limit],
        ),
        (
            "unwritten",
            "consumer VARCHAR, share DOUBLE, detail VARCHAR",
            [(waiting.consumer, waiting.share, waiting.detail) for waiting in unwritten],
        ),
        ("damaged", "path VARCHAR", [(path,) for path in damaged]),
        ("replicas", "replica VARCHAR", [(replica_name(url),) for url in urls]),
    ):
        connection.execute(f"CREATE OR REPLACE TEMP TABLE {name} ({columns})")
        if rows:
            places = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {name} VALUES ({places})", rows)  # noqa: S608 - no one's text


def evaluate(
    connection: duckdb.DuckDBPyConnection, config: Config, alarm: Alarm, now: datetime | None = None
) -> list[Condition]:
    """Run the query of `alarm`. `connection` has the store's views and the tables of `measured_tables`; `now` is a time
    in UTC, the present if it is `None`. A row without a detail is logged and left out, because such an event can't be
    decoded. Raises `duckdb.Error`."""
    compared = threshold(config, alarm)
    values = {
        "threshold": compared,
        "now": (now or datetime.now(UTC)).replace(tzinfo=None),
        "steps": config.alarms.steps,
        "groups": config.alarms.groups,
        "window_s": config.alarms.window_s,
        "outside": [table.name for table in config.outside],
    }
    used = set(PARAMETER.findall(alarm.sql))
    rows = connection.execute(alarm.sql, {n: v for n, v in values.items() if n in used}).fetchall()
    conditions = []
    for project, model, about, value, detail in rows:
        if isinstance(detail, str):
            named = project or config.project
            conditions.append(Condition(alarm.name, named, model, about, _number(value), compared, detail))
        else:
            logger.warning(
                "a condition says nothing", alarm=alarm.name, project=project, model=model, about=about, value=value
            )
    return conditions


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
