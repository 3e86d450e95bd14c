"""The store service: a writer for each of the store's consumers, all into one place, compaction, curves,
and the alarms."""

from __future__ import annotations

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from store.alarms.checker import Checker
from store.alarms.webhook import Webhook, webhook_url
from store.catalog import Catalog
from store.compaction import Compactor
from store.curves.task import Curves
from store.curves.trackers import check_trackers
from store.location import open_target
from store.repair import repair
from store.writer import Writer, store_consumers


def check(config: Config) -> None:
    """Raise `ConfigError` if `store.dir` names no place, `alarms.webhook` no address, or `curves.trackers` a library
    that is not installed."""
    open_target(config)
    webhook_url(config)
    check_trackers(config)


async def serve(config: Config, ready: Ready) -> None:
    """Write the log to files until cancelled; `ready` is called once all consumers are followed.

    Raises `StoreBusyError` where another process writes to the same place."""
    target, webhook = open_target(config), Webhook(config)
    with target.locked():
        catalog = Catalog(target)
        async with Broker.connect(config.nats, name="store") as broker:
            damaged = await anyio.to_thread.run_sync(catalog.load)
            if damaged:
                await repair(broker, catalog, damaged)
            async with anyio.create_task_group() as tg:
                for spec in store_consumers():
                    await tg.start(Writer(broker, catalog, config.store, spec).run)
                tg.start_soon(Compactor(catalog, config.store).run)
                if config.curves.enabled:
                    tg.start_soon(Curves(config, broker).run)
                tg.start_soon(webhook.run)
                tg.start_soon(Checker(config, broker, webhook.send).run)
                ready(folder=str(target))
