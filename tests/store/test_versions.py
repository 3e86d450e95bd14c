"""Versions in the lake: the store copies them before it acknowledges their events."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import NatsConfig, StoreConfig
from pipeline.events import STATE_FILE, CheckpointPublished, decode, wire_name
from pipeline.log.broker import Broker
from pipeline.versions.lake_files import ADAPTER, EVENT, checkpoint_folder
from store.lake.lake import lake_in
from store.lake.storage import LocalStorage
from store.lake.versions import copy_version
from store.lake.writer import Writer, store_consumers
from tests.trainer.kit import checkpoint_event

pytestmark = pytest.mark.anyio

EVENT_1 = msgspec.structs.replace(checkpoint_event(1, {STATE_FILE: b"state"}), adapter="p/tiny@1/a")
FOLDER = checkpoint_folder("p", "main", "tiny", 1)


async def publish(broker: Broker, event: CheckpointPublished) -> None:
    await broker.put_object(streams.ADAPTERS_BUCKET, event.adapter, b"adapter")
    await broker.put_object(streams.ADAPTERS_BUCKET, event.state, b"state")
    await broker.publish(event)


@pytest.mark.parametrize(
    ("kept", "files"), [("all", {ADAPTER, STATE_FILE, EVENT}), ("adapters", {ADAPTER, EVENT}), ("none", set())]
)
async def test_the_store_copies_a_version(kept: str, files: set[str], nats_config: NatsConfig, tmp_path: Path) -> None:
    lake = lake_in(tmp_path)
    spec = next(c for c in store_consumers() if c.stream == "POLICY")
    config = msgspec.structs.replace(StoreConfig(flush_s=0.1), checkpoints=kept)
    async with Broker.connect(nats_config) as broker, anyio.create_task_group() as tg:
        await broker.provision_consumer(spec)
        await publish(broker, EVENT_1)
        await tg.start(Writer(broker, lake, config, spec).run)
        with anyio.fail_after(60):
            while not lake.names(wire_name(EVENT_1)):
                await anyio.sleep(0.05)
        tg.cancel_scope.cancel()
    folder = tmp_path / FOLDER
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
    calls = 0
    put = LocalStorage.put

    def full_twice(self: LocalStorage, folder: str, name: str, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise OSError(28, "No space left on device")
        put(self, folder, name, content)

    monkeypatch.setattr(LocalStorage, "put", full_twice)
    monkeypatch.setattr("store.lake.versions._RETRY_S", 0.01)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, EVENT_1)
        await copy_version(broker, LocalStorage(tmp_path), "all", EVENT_1)
    assert (tmp_path / FOLDER / EVENT).exists()
    assert not list(tmp_path.rglob(".tmp*"))
