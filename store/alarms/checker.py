"""The check of the alarms, a task of the store service: every `alarms.every_s` it runs the ten queries, publishes
`policy.alarm` for each alarm that began or ended, and gives the change to the webhook.

The queries run in a thread with a DuckDB of one thread, so the writers go on meanwhile. Which alarms hold is read
from the log at the start: a restart raises nothing twice.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable

import anyio
import anyio.to_thread
import duckdb
import nats.errors
import nats.js.errors

from pipeline import streams
from pipeline.config import Config
from pipeline.events import AlarmChanged, now_us
from pipeline.log.broker import Broker, BrokerError
from pipeline.telemetry.logs import get_logger
from store import sql
from store.alarms import reading
from store.alarms.reading import Fill, Found
from store.alarms.table import ALARMS
from store.lake import open_lake
from store.place import StoreError

log = get_logger("store.alarms")

_CLEAR_AFTER = 2
"""Checks in a row in which the condition does not hold before an alarm ends: it does not flicker at its threshold."""
_PAUSE = 20
"""A long check is followed by a pause of so many times its length, which leaves the machine to the writers."""
_MEMORY = "256MB"

Key = tuple[str, str, str, str]


class Checker:
    """Checks the alarms of one run."""

    def __init__(self, config: Config, broker: Broker, tell: Callable[[AlarmChanged], None]) -> None:
        """`tell` is called with every change after the log acknowledged it."""
        self._config, self._broker, self._tell = config, broker, tell
        self._raised: dict[Key, AlarmChanged] = {}
        self._absent: dict[Key, int] = {}
        """Checks since the condition of a raised alarm held last."""
        self._lake, self._shown = open_lake(config), dict[str, list[str]]()

    async def run(self) -> None:
        """Check until cancelled, the first time after `alarms.every_s`."""
        rebuilt, took_s = False, 0.0
        with duckdb.connect(config={"memory_limit": _MEMORY, "threads": "1"}) as connection:
            while True:
                await anyio.sleep(max(self._config.alarms.every_s, _PAUSE * took_s))
                rebuilt = rebuilt or await self._rebuild()
                if not rebuilt:
                    continue
                began = anyio.current_time()
                # A thread can't be stopped: a cancellation waits for the end of the round.
                with anyio.CancelScope(shield=True):
                    found, unknown = await self._look(connection)
                took_s = anyio.current_time() - began
                await self._apply(found, unknown)

    async def _rebuild(self) -> bool:
        """Read from the log which alarms hold. Returns false where the log does not answer."""
        try:
            changes = await self._broker.read(AlarmChanged)
        except BrokerError as error:
            log.warning("the alarms are not known yet", why=str(error))
            return False
        for recorded in changes:
            event = recorded.event
            key = event.alarm, event.project, event.model, event.about
            if event.state == "raised":
                self._raised[key] = event
            else:
                self._raised.pop(key, None)
        return True

    async def _look(self, connection: duckdb.DuckDBPyConnection) -> tuple[list[Found], set[str]]:
        """Run all queries. Returns what was found, and the names of the alarms that could not be checked."""
        fills, measured = await self._fills()
        found, failed = await anyio.to_thread.run_sync(self._query, connection, fills)
        return found, failed if measured else failed | {"log_full"}

    def _query(
        self, connection: duckdb.DuckDBPyConnection, fills: list[Fill]
    ) -> tuple[list[Found], set[str]]:
        try:
            sql.show(connection, self._lake, self._shown)
            reading.measured_tables(connection, self._config, fills)
        except (StoreError, duckdb.Error, OSError) as error:
            log.warning("the alarms were not checked", why=str(error))
            return [], {alarm.name for alarm in ALARMS}
        found: list[Found] = []
        failed: set[str] = set()
        for alarm in ALARMS:
            try:
                found += reading.evaluate(connection, self._config, alarm)
            except duckdb.Error as error:  # such as a file that compaction removed meanwhile
                log.warning("an alarm was not checked", alarm=alarm.name, why=str(error))
                failed.add(alarm.name)
        return found, failed

    async def _fills(self) -> tuple[list[Fill], bool]:
        """The sizes of what may fill up, and whether the log told its own."""
        disk = shutil.disk_usage(self._config.path())
        fills = [Fill("the disk of the run directory", "disk", disk.total - disk.free, disk.total)]
        names = [s.name for s in streams.STREAMS] + [streams.bucket_stream(b.name) for b in streams.buckets()]
        for name in names:
            try:
                info = await self._broker.js.stream_info(name)
            except nats.js.errors.NotFoundError:
                continue
            except (nats.errors.Error, TimeoutError) as error:
                log.warning(
                    "the log's size is not known", stream=name, why=str(error) or type(error).__name__
                )
                return fills, False
            if (limit := info.config.max_bytes or 0) > 0:
                fills.append(Fill(name, "stream", info.state.bytes, limit))
        return fills, True

    async def _apply(self, found: Iterable[Found], unknown: set[str]) -> None:
        """Publish what began and what ended. Alarms named in `unknown` stay as they are."""
        present = {one.key: one for one in found}
        for key, one in present.items():
            self._absent.pop(key, None)
            if key not in self._raised:
                at = now_us()
                event = AlarmChanged(
                    project=one.project, alarm=one.alarm, state="raised", model=one.model, about=one.about,
                    value=one.value, threshold=one.threshold, detail=one.detail, since=at, at=at,
                )  # fmt: skip
                if await self._publish(event):
                    self._raised[key] = event
        for key, event in list(self._raised.items()):
            if key in present or key[0] in unknown:
                continue
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= _CLEAR_AFTER and await self._publish(_cleared(event)):
                del self._raised[key], self._absent[key]

    async def _publish(self, event: AlarmChanged) -> bool:
        """Publish a change and tell of it. Returns false where the log does not take it: the next check tries again."""
        try:
            await self._broker.publish(event)
        except BrokerError as error:
            log.error("an alarm was not recorded", alarm=event.alarm, state=event.state, why=str(error))
            return False
        write = log.error if event.state == "raised" else log.info
        write("alarm" if event.state == "raised" else "alarm over", alarm=event.alarm, detail=event.detail)
        self._tell(event)
        return True


def _cleared(event: AlarmChanged) -> AlarmChanged:
    return AlarmChanged(
        project=event.project, alarm=event.alarm, state="cleared", model=event.model, about=event.about,
        value=event.value, threshold=event.threshold, detail=event.detail, since=event.since,
    )  # fmt: skip
