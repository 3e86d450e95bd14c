"""Versions in the lake: the store copies them before it acknowledges their events."""

from pathlib import Path

import msgspec
import pytest

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import STATE_FILE, CheckpointPublished, decode
from pipeline.log.broker import Broker
from pipeline.versions.lake_files import ADAPTER, EVENT, checkpoint_folder
from store.lake.storage import LocalStorage
from store.lake.versions import copy_version
from tests.store.kit import StoreProcess, until_acked
from tests.trainer.kit import checkpoint_event

EVENT_1 = msgspec.structs.replace(checkpoint_event(1, {STATE_FILE: b"state"}), adapter="p/tiny@1/a")
FOLDER = checkpoint_folder("p", "main", "tiny", 1)


async def publish(broker: Broker, event: CheckpointPublished) -> None:
    await broker.put_object(streams.ADAPTERS_BUCKET, event.adapter, b"adapter")
    await broker.put_object(streams.ADAPTERS_BUCKET, event.state, b"state")
    await broker.publish(event)


@pytest.mark.parametrize(
    ("kept", "files"), [("all", {ADAPTER, STATE_FILE, EVENT}), ("adapters", {ADAPTER, EVENT}), ("none", set())]
)
async def test_the_store_copies_a_version(
    kept: str, files: set[str], nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path
) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish(broker, EVENT_1)
        async with running_store(checkpoints=kept):
            await until_acked(broker)
    folder = tmp_path / "store" / FOLDER
    assert {p.name for p in folder.glob("*")} == files
    if EVENT in files:
        assert decode((folder / EVENT).read_bytes()) == EVENT_1
        assert (folder / ADAPTER).read_bytes() == b"adapter"


async def test_a_lost_state_and_a_lost_adapter_stop_nothing(broker: Broker, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    await copy_version(broker, storage, "all", EVENT_1)  # the object store has nothing of it
    assert not (tmp_path / FOLDER / EVENT).exists()
    await broker.put_object(streams.ADAPTERS_BUCKET, EVENT_1.adapter, b"adapter")
    await copy_version(broker, storage, "all", EVENT_1)
    assert {p.name for p in (tmp_path / FOLDER).glob("*")} == {ADAPTER, EVENT}


async def test_a_copy_waits_for_a_disk_with_room(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, full = LocalStorage.put, [OSError(28, "No space left on device")] * 2

    def full_twice(self: LocalStorage, folder: str, name: str, content: bytes) -> None:
        if full:
            raise full.pop()
        put(self, folder, name, content)

    monkeypatch.setattr(LocalStorage, "put", full_twice)
    monkeypatch.setattr("store.lake.versions._RETRY_S", 0.01)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, EVENT_1)
        await copy_version(broker, LocalStorage(tmp_path), "all", EVENT_1)
    assert (tmp_path / FOLDER / EVENT).exists()
    assert not list(tmp_path.rglob(".tmp*"))
