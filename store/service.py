"""The store service. It runs one writer per consumer, all into one lake, table maintenance and alarms.

Any number of store processes may write into one lake. Of those that share a run directory, the one that holds a file
lock checks the alarms. When it ends, another one gets the lock and continues."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.files import try_lock
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from store.alarms.checker import Checker
from store.lake.lake import Lake, open_lake
from store.lake.maintenance import Maintenance
from store.lake.storage import open_storage
from store.lake.table import LAKE_ERRORS
from store.lake.writer import Writer, store_consumers

logger = get_logger("store.service")

_LOCK_RETRY_S = 2.0
"""Pause between two attempts to get the lock of the run directory."""


def check(config: Config) -> None:
    """Raise `ConfigError` if `store.dir` names no bucket."""
    open_storage(config)


async def serve(config: Config, ready: Ready) -> None:
    """Write the events of the log to the lake until cancelled. `ready` is called once all writers receive events."""
    lake = open_lake(config)
    async with Broker.connect(config.nats, name="store") as broker:
        await _prepare(lake)
        async with anyio.create_task_group() as tg:
            for spec in store_consumers():
                await tg.start(Writer(broker, lake, config.store, spec).run)
            maintenance = Maintenance(lake, config.store)
            tg.start_soon(maintenance.run)
            tg.start_soon(_serve_run_directory, config, broker, maintenance.damaged)
            ready(folder=str(lake))


async def _prepare(lake: Lake) -> None:
    """Make the tables ready for writing. If the lake can't be reached, that is done when the first events are
    written."""
    try:
        await anyio.to_thread.run_sync(lake.prepare)
    except LAKE_ERRORS as error:
        if not lake.storage.is_retryable(error):
            raise
        logger.warning(
            "the lake can't be reached; events stay on the log until it can", folder=str(lake), why=str(error)
        )


async def _serve_run_directory(config: Config, broker: Broker, unmerged: Mapping[str, str]) -> None:
    """Wait for the lock of the run directory, then check its alarms until cancelled."""
    path = config.path("store.lock")
    await anyio.to_thread.run_sync(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    with path.open("w") as file:
        while not try_lock(file):  # noqa: ASYNC110 - no event tells that a file lock is free
            await anyio.sleep(_LOCK_RETRY_S)
        await Checker(config, broker, unmerged).run()
