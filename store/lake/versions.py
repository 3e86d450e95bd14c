"""Copies of versions in the lake, from which another installation can fork (`models.0.start`).

The store copies what `store.checkpoints` names before it acknowledges the event of the version, so a version whose
event is in the lake has its files there, unless the object store had lost them before."""

from __future__ import annotations

import anyio
import anyio.to_thread

from pipeline import streams
from pipeline.errors import HistoryGoneError
from pipeline.events import STATE_FILE, CheckpointPublished, encode
from pipeline.log.broker import Broker
from pipeline.telemetry.logs import get_logger
from pipeline.versions.lake_files import ADAPTER, EVENT, checkpoint_folder
from store.lake.storage import Storage

logger = get_logger("store.lake.versions")

_RETRY_S = 1.0


async def copy_version(broker: Broker, storage: Storage, contents: str, event: CheckpointPublished) -> None:
    """Copy a version from the log's object store into `storage`, unless it is there. `contents` is `store.checkpoints`.
    Retries while the disk is full or object storage can't be reached."""
    while contents != "none":
        try:
            await _copy_files(broker, storage, contents, event)
            return
        except HistoryGoneError as error:
            logger.warning("version not copied: it can't be forked", version=event.version, reason=str(error))
            return
        except OSError as error:
            if not storage.is_retryable(error):
                raise
            logger.error("version not copied; trying again", version=event.version, why=str(error))
            await anyio.sleep(_RETRY_S)  # no event tells that the cause is gone


async def _copy_files(broker: Broker, storage: Storage, contents: str, event: CheckpointPublished) -> None:
    """Copy a version's adapter, its training state if `contents` is `all`, and last its event, which marks the copy as
    complete. Raises `HistoryGoneError` if the adapter is gone, and `OSError`."""
    folder = checkpoint_folder(event.project, event.branch, event.model, event.step)
    if await anyio.to_thread.run_sync(storage.holds, folder, EVENT):
        return
    objects = {ADAPTER: event.adapter}
    if contents == "all" and event.state:
        objects[STATE_FILE] = event.state
    for name, stored in objects.items():
        try:
            content = await broker.get_object(streams.ADAPTERS_BUCKET, stored)
        except HistoryGoneError:
            if name == ADAPTER:
                raise
            logger.warning("training state not copied: a fork begins a fresh optimizer", version=event.version)
        else:
            await anyio.to_thread.run_sync(storage.put, folder, name, content)
    await anyio.to_thread.run_sync(storage.put, folder, EVENT, encode(event))
