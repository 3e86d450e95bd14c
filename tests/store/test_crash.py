"""Deaths of a store with object storage, and of the NATS server: every event is in Parquet once.

One history is written through 11 lives of the store. Each life dies at one of the stop points in turn, at a seeded
passage; in some, the server is killed under it; publishers repeat what they can't know to have arrived. In the end
every event of the log is in the files exactly once, and nothing else is. `tests/test_crash.py` has the deaths at each
stop point with local files.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from pipeline import crash, streams
from pipeline.config import Config, NatsConfig, StoreConfig, save
from pipeline.events import Event, GroupDiscarded, PolicyPromoted, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from store.lake.lake import open_lake
from tests.conftest import NatsServer
from tests.kits.crash.processes import ForkServer, ServiceProcess, fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.settings import with_values
from tests.store.kit import ACK_WAIT_S, exchange, in_log, stored_events

pytestmark = pytest.mark.anyio

LIVES = 11
RARE = ("store.compacted", "store.checkpointed")
"""Points that few lives pass twice."""
POINTS = [p for p in crash.POINTS if p.startswith("store.")] + ["broker.before_publish", "broker.after_publish"]


def experience(rng: random.Random, life: int) -> list[Event]:
    """What agents and services say in one life of the store: several tags, several streams."""
    name = f"t{life}"
    made: list[Event] = [TrajectoryOpened(project="p", trajectory=name, model="m", group=f"g{life}")]
    made += [exchange(name, seq) for seq in range(rng.randint(1, 12))]
    made.append(TrajectoryCompleted(project="p", trajectory=name, model="m", group=f"g{life}"))
    if rng.random() < 0.5:
        made.append(
            GroupDiscarded(project="p", model="m", group=f"g{life}", trajectories=(name,), reason="late", by="judge")
        )
    if rng.random() < 0.3:
        made.append(PolicyPromoted(project="p", model="m", version="m@0", request=f"r{life}"))
    return made


async def one_life(
    rng: random.Random, life: int, broker: Broker, server: NatsServer, stores: ForkServer, config: Config
) -> str:
    """Publish, let a store begin that will die somewhere, perhaps kill the server. Returns how it ended: its point and
    status, and whether it ended by itself."""
    point = POINTS[life % len(POINTS)]
    events = experience(rng, life)
    half = rng.randint(0, len(events))
    for event in events[:half]:
        await broker.publish(event)
    if rng.random() < 0.3:
        await broker.js.publish(f"rollout.exchange.p.garbage{life}", b"\xc1", headers={"Nats-Msg-Id": f"x{life}"})
    settings = config.path(f"life{life}.toml")
    save(with_values(config, {"store.flush_rows": rng.randint(2, 9)}), settings)
    passage = 1 if point in RARE else rng.randint(1, 3)
    store = stores.start("store", f"{point}:{passage}", settings)

    async def publish_rest() -> None:
        for event in events[half:]:
            await broker.publish(event)
            if rng.random() < 0.1:
                await broker.publish(event)  # an agent that did not see the answer

    async with anyio.create_task_group() as tg:
        tg.start_soon(publish_rest)
        if rng.random() < 0.12:
            with anyio.move_on_after(rng.random() * 0.15):
                await store.ended.wait()
            server.kill()
            await anyio.to_thread.run_sync(server.start)
        if life % 4:  # else it may be killed while it starts; on a slow machine it is
            await has_worked(store, broker)
        with anyio.move_on_after(rng.choice([0.25, 0.5])):
            await store.ended.wait()
        alone = store.ended.is_set()
        status = await store.end(rng.choice([signal.SIGTERM, signal.SIGKILL]))
    return f"{point} {status}{' at it' * alone}"


async def has_worked(store: ServiceProcess, broker: Broker) -> None:
    """Until the store has ended or all that was published is written, however slow the machine is."""
    with anyio.fail_after(60):
        while not store.ended.is_set() and await broker.lag("store-"):
            await anyio.sleep(0.02)  # the server can only be asked


@pytest.mark.timeout(1800)
@pytest.mark.slow
async def test_over_many_deaths_nothing_is_lost_and_nothing_is_twice(
    nats_server: NatsServer, object_store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S, endless=True))
    rng = random.Random(20261121)
    config = Config(
        run_dir=str(tmp_path),
        nats=NatsConfig(url=nats_server.url, publish_deadline_s=30, ack_timeout_s=1.0),
        store=StoreConfig(flush_s=0.03, compact_s=0.03, compact_files=3, compact_grace_s=0.0, **object_store),
    )
    last = with_values(config, {"store.flush_rows": 1000, "store.compact_s": 3600.0})
    save(last, tmp_path / "last.toml")
    endings: Counter[str] = Counter()
    async with (
        Broker.connect(config.nats) as broker,
        fork_server(tmp_path / "last.toml", "store", ack_wait_s=ACK_WAIT_S) as stores,
    ):
        for life in range(LIVES):
            endings[await one_life(rng, life, broker, nats_server, stores, config)] += 1
        store = stores.start("store")
        await store.ready.wait()  # it listens to signals
        with anyio.fail_after(60):
            while await broker.lag("store-"):
                await anyio.sleep(0.05)
        assert await store.end(signal.SIGTERM) == 0
        expected = await in_log(broker)
    found = stored_events(open_lake(config))
    assert {k: n for k, n in found.items() if n != 1} == {}
    assert set(found) == expected
    # On a loaded machine many lives are killed from here before they reach their stop point, half of them by SIGKILL.
    assert sum(n for k, n in endings.items() if not k.endswith(" 0")) > LIVES / 4, endings
