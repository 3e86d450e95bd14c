"""Checks the alarms, as a task of the store service. Every `alarms.every_s` it runs their queries, and publishes
`policy.alarm` for each alarm that is raised or cleared.

The queries run in a separate thread, with a DuckDB of one thread, so the writers continue. The raised alarms are read
from the log before each change, so a restart raises no alarm again, and only one of several stores raises it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import anyio
import anyio.to_thread
import duckdb
import msgspec
import nats.errors
import nats.js.errors

from pipeline import streams
from pipeline.config import Config
from pipeline.events import AlarmChanged, now_us
from pipeline.log.broker import Broker, BrokerError
from pipeline.log.health import Fill, disk_fill, fills
from pipeline.log.unwritten import Unwritten, UnwrittenEvents
from pipeline.streams import replica_name
from pipeline.telemetry.logs import get_logger
from store.alarms.table import ALARMS, Alarm, threshold
from store.lake.lake import open_lake
from store.lake.storage import StoreError
from store.reading import sql

logger = get_logger("store.alarms")

_CLEAR_AFTER = 2
"""Number of consecutive checks without the condition after which an alarm is cleared, so that a value at the threshold
does not raise and clear it repeatedly."""
_PAUSE_FACTOR = 20
"""A check is followed by a pause of at least this many times its duration, so that checks use little CPU time."""
_MEMORY = "256MB"


def create_measured_tables(
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
            placeholders = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {name} VALUES ({placeholders})", rows)  # noqa: S608 - no user's text


def evaluate(
    connection: duckdb.DuckDBPyConnection, config: Config, alarm: Alarm, now: datetime | None = None
) -> list[AlarmChanged]:
    """Run the query of `alarm`. Return an event for each row, which says that the condition is met for a model, server,
    consumer or stream. `connection` has the store's views and the tables of `create_measured_tables`; `now` is a time
    in UTC, the present if it is `None`. A row without a detail is logged and left out, because such an event can't be
    decoded. Raises `duckdb.Error`."""
    limit = threshold(config, alarm)
    values = {
        "threshold": limit,
        "now": (now or datetime.now(UTC)).replace(tzinfo=None),
        "steps": config.alarms.steps,
        "groups": config.alarms.groups,
        "window_s": config.alarms.window_s,
        "outside": [table.name for table in config.outside],
    }
    rows = sql.execute(connection, alarm.sql, values).fetchall()
    conditions = []
    for project, model, about, value, detail in rows:
        if isinstance(detail, str):
            conditions.append(
                AlarmChanged(
                    project=project or config.project,
                    alarm=alarm.name,
                    state="raised",
                    model=model,
                    about=about,
                    value=math.nan if value is None else float(value),
                    threshold=limit,
                    detail=detail,
                    action=alarm.action,
                )
            )
        else:
            logger.warning(
                "a condition says nothing", alarm=alarm.name, project=project, model=model, about=about, value=value
            )
    return conditions


Key = tuple[str, str, str, str]
"""Alarm, project, model, and what it is about: what tells raised alarms apart."""


class Checker:
    """Checks the alarms of one installation."""

    def __init__(self, config: Config, broker: Broker, unmerged: Mapping[str, str]) -> None:
        """`unmerged` has the damaged files that maintenance finds (`Maintenance.damaged`)."""
        self._unmerged = unmerged
        self._config, self._broker = config, broker
        self._raised: dict[Key, AlarmChanged] = {}
        """The raised alarms, according to the log."""
        self._sent: dict[Key, AlarmChanged] = {}
        """Changes that this checker has published and not yet read from the log."""
        self._newest: dict[str, int] = {}
        """By subject, the sequence of the newest change that was read."""
        self._read_to = 0
        """The sequence up to which changes were read."""
        self._unwritten = UnwrittenEvents(config.alarms.unwritten_share)
        self._absent: dict[Key, int] = {}
        """By raised alarm, the number of checks since its condition was last met."""
        self._began = time.monotonic()
        self._starting: dict[str, float] = {}
        """By inference server that is behind and was without a record, since when, by `time.monotonic`."""
        self._lake, self._shown = open_lake(config), dict[str, list[str]]()

    async def run(self) -> None:
        """Check until cancelled, the first time after `alarms.every_s`."""
        took_s = 0.0
        with duckdb.connect(config={"memory_limit": _MEMORY, "threads": "1"}) as connection:
            while True:
                await anyio.sleep(max(self._config.alarms.every_s, _PAUSE_FACTOR * took_s))
                began = anyio.current_time()
                # A thread can't be stopped: a cancellation waits for the end of the round.
                with anyio.CancelScope(shield=True):
                    conditions, unknown = await self._check(connection)
                took_s = anyio.current_time() - began
                try:
                    await self._read_changes()
                except BrokerError as error:
                    logger.warning("the raised alarms could not be read from the log", why=str(error))
                    continue
                await self._apply(conditions, unknown)

    async def _read_changes(self) -> None:
        """Read the changes that the log has since the last call into `_raised`. Write a log line for each that this
        checker published. Raises `BrokerError`."""
        for recorded in await self._broker.read(AlarmChanged, start_seq=self._read_to + 1):
            event = recorded.event
            key = _key(event)
            self._newest[event.subject()] = self._read_to = recorded.seq
            if event.state == "raised":
                self._raised[key] = event
            else:
                self._raised.pop(key, None)
                self._absent.pop(key, None)
            if self._sent.get(key) == event:
                del self._sent[key]
                write = logger.error if event.state == "raised" else logger.info
                write("alarm" if event.state == "raised" else "alarm over", alarm=event.alarm, detail=event.detail)

    async def _check(self, connection: duckdb.DuckDBPyConnection) -> tuple[list[AlarmChanged], set[str]]:
        """Run all queries. Return the conditions that are met, and the names of the alarms that could not be
        checked."""
        measured, unwritten, unknown = [disk_fill(self._config.path())], list[Unwritten](), set[str]()
        try:
            measured += await fills(self._broker)
        except BrokerError as error:
            logger.warning("the log's size is not known", why=str(error))
            unknown.add("log_full")
        try:
            unwritten = await self._unwritten.check(self._broker)
        except (BrokerError, nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            logger.warning("the store's lag could not be read", why=str(error) or type(error).__name__)
            unknown.add("store_behind")
        conditions, failed = await anyio.to_thread.run_sync(self._query, connection, measured, unwritten)
        return conditions, failed | unknown

    def _query(
        self, connection: duckdb.DuckDBPyConnection, measured: list[Fill], unwritten: list[Unwritten]
    ) -> tuple[list[AlarmChanged], set[str]]:
        """Run the alarms' queries; it blocks. Return the conditions that are met, and the names of the alarms whose
        query failed: all of them if the lake can't be read."""
        try:
            damaged: set[str] = set()
            sql.define_views(connection, self._lake, self._shown, damaged)
            damaged |= set(self._unmerged.values())
            create_measured_tables(connection, self._config, measured, unwritten, sorted(damaged))
        except (StoreError, duckdb.Error, OSError) as error:
            logger.warning("the alarms were not checked", why=str(error))
            return [], {alarm.name for alarm in ALARMS}
        conditions: list[AlarmChanged] = []
        failed: set[str] = set()
        for alarm in ALARMS:
            try:
                conditions += evaluate(connection, self._config, alarm)
            except duckdb.Error as error:  # such as a file that compaction removed meanwhile
                logger.warning("an alarm was not checked", alarm=alarm.name, why=str(error))
                failed.add(alarm.name)
        return conditions, failed

    async def _apply(self, conditions: Iterable[AlarmChanged], unknown: set[str]) -> None:
        """Publish the alarms that are raised or cleared. Alarms named in `unknown` do not change. If another store has
        published first, or the log does not answer, the next check tries again."""
        present = {_key(met): met for met in conditions}
        for key, met in present.items():
            self._absent.pop(key, None)
            if key not in self._raised and not await self._may_be_starting(met):
                at = now_us()
                await self._publish(msgspec.structs.replace(met, since=at, at=at))
        behind = {met.about for met in present.values() if met.alarm == "replica_behind"}
        self._starting = {replica: at for replica, at in self._starting.items() if replica in behind}
        for key, event in list(self._raised.items()):
            if key in present or key[0] in unknown:
                continue
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= _CLEAR_AFTER:
                await self._publish(msgspec.structs.replace(event, state="cleared", at=now_us()))

    async def _may_be_starting(self, condition: AlarmChanged) -> bool:
        """Return whether `condition` says that an inference server is behind, and the server may still be starting:
        less than `vllm.start_timeout_s` ago this store started, or the server was first found without the record that
        its sampler agent writes when it holds all versions."""
        if condition.alarm != "replica_behind":
            return False
        key = streams.key_subject(streams.FLEET.name, streams.sampler_key(condition.project, condition.about))
        try:
            record = await self._broker.leader_get(streams.key_value_stream(streams.FLEET.name), {"last_by_subj": key})
        except BrokerError as error:
            logger.warning("the inference servers could not be read from the log", why=str(error))
            return True  # the next check asks again
        now = time.monotonic()
        if record is None or not record.payload:
            self._starting.setdefault(condition.about, now)
        return now - self._starting.get(condition.about, self._began) < self._config.vllm.start_timeout_s

    async def _publish(self, event: AlarmChanged) -> None:
        """Publish a change, unless another store has published one on its subject since this one read the log."""
        self._sent[_key(event)] = event
        try:
            await self._broker.publish(event, after=self._newest.get(event.subject(), 0))
            await self._read_changes()
        except BrokerError as error:
            logger.error("an alarm was not recorded", alarm=event.alarm, state=event.state, why=str(error))


def _key(event: AlarmChanged) -> Key:
    """Return what tells the alarm of an event from other raised alarms."""
    return event.alarm, event.project, event.model, event.about
