"""The store service: a writer for each of the store's consumers, all into one lake, upkeep, curves, and the alarms.

Any number of store processes may write into one lake. Those of one run directory agree by a file lock on who writes its
curves and checks its alarms; when that process ends, another goes on."""

from __future__ import annotations

import fcntl

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.telemetry.logs import get_logger
from store.alarms.checker import Checker
from store.alarms.webhook import Webhook, webhook_url
from store.curves.task import Curves
from store.curves.trackers import check_trackers
from store.lake import Lake, open_lake
from store.place import open_place
from store.repair import repair
from store.table import LakeError
from store.upkeep import Upkeep
from store.writer import Writer, store_consumers

log = get_logger("store.service")

_ASK_S = 2.0
"""Pause between two questions whether another process still holds the run directory's lock."""


def check(config: Config) -> None:
    """Raise `ConfigError` if `store.dir` names no place, `alarms.webhook` no address, or `curves.trackers` a library
    that is not installed."""
    open_place(config)
    webhook_url(config)
    check_trackers(config)


async def serve(config: Config, ready: Ready) -> None:
    """Write the log to the lake until cancelled; `ready` is called once all consumers are followed."""
    lake = open_lake(config)
    async with Broker.connect(config.nats, name="store") as broker:
        await _open(lake, broker)
        async with anyio.create_task_group() as tg:
            for spec in store_consumers():
                await tg.start(Writer(broker, lake, config.store, spec).run)
            tg.start_soon(Upkeep(lake, config.store).run)
            tg.start_soon(_for_the_run, config, broker)
            ready(folder=str(lake))


async def _open(lake: Lake, broker: Broker) -> None:
    """Open the lake and repair what is damaged. A lake that is away is opened when the first events are written."""
    try:
        if damaged := await anyio.to_thread.run_sync(lake.open):
            await repair(broker, lake, damaged)
    except LakeError as error:
        if not lake.place.is_retryable(error):
            raise
        log.warning("the lake is away", folder=str(lake), why=str(error))


async def _for_the_run(config: Config, broker: Broker) -> None:
    """Write the curves and check the alarms of the run directory, once no other process does."""
    path = config.path("store.lock")
    await anyio.to_thread.run_sync(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    with path.open("w") as file:
        while not _locked(file.fileno()):  # noqa: ASYNC110 - a file lock can only be asked for
            await anyio.sleep(_ASK_S)
        webhook = Webhook(config)
        async with anyio.create_task_group() as tg:
            if config.curves.enabled:
                tg.start_soon(Curves(config, broker).run)
            tg.start_soon(webhook.run)
            tg.start_soon(Checker(config, broker, webhook.send).run)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
