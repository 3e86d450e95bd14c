"""Several stores on one partition: each event is in the lake once, whichever of them is killed or sleeps.

`tests/test_crash.py` has the deaths of a store at each stop point, and those of the NATS server."""

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from pipeline import streams
from pipeline.config import Config, NatsConfig, StoreConfig, save
from pipeline.log.broker import Broker
from store.lake.lake import open_lake
from store.service import serve
from tests.conftest import NatsServer
from tests.kits.crash.checks import in_log
from tests.kits.crash.processes import ServiceProcess, fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.waiting import until_true
from tests.store.kit import ACK_WAIT_S, exchange, publish, stored_events, until_acked


async def check(broker: Broker, config: Config) -> None:
    """The lake equals the log."""
    found = await anyio.to_thread.run_sync(stored_events, open_lake(config))
    assert {place: count for place, count in found.items() if count != 1} == {}
    assert set(found) == set(await in_log(broker))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("where", "count"), [("a folder", 3), ("object storage", 1)])
async def test_stores_that_are_killed_and_stores_that_sleep(
    nats_server: NatsServer,
    nats_config: NatsConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    where: str,
    count: int,
) -> None:
    bucket: dict[str, Any] = request.getfixturevalue("object_store") if where == "object storage" else {}
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S, endless=True))
    rng = random.Random(11)
    config = Config(
        run_dir=str(tmp_path),
        nats=NatsConfig(url=nats_server.url, ack_timeout_s=1.0),
        store=StoreConfig(flush_s=0.03, flush_rows=5, compact_s=0.2, compact_files=4, compact_grace_s=60.0, **bucket),
    )
    save(config, tmp_path / "config.toml")
    done: Counter[str] = Counter()
    async with (
        Broker.connect(nats_config) as broker,
        fork_server(tmp_path / "config.toml", "store", ack_wait_s=ACK_WAIT_S) as forks,
    ):
        stores = [forks.start("store") for _ in range(count)]
        asleep: set[ServiceProcess] = set()
        for turn in range(40):
            await publish(broker, [exchange(f"t{turn}", seq) for seq in range(rng.randint(1, 12))])
            store = rng.choice(stores)
            if store in asleep:
                store.send(signal.SIGCONT)
                asleep.remove(store)
            elif len(asleep) < 2 and rng.random() < 0.7:
                store.send(signal.SIGSTOP)
                asleep.add(store)
                done["asleep"] += 1
            else:
                await store.end(signal.SIGKILL)
                stores[stores.index(store)] = forks.start("store")
                done["killed"] += 1
            await anyio.sleep(rng.random() * 0.3)  # how far each has come is chance
        for store in asleep:
            store.send(signal.SIGCONT)
        await until_acked(broker, 180)
        for store in stores:
            await store.ready.wait()
            await store.end(signal.SIGTERM)
        await check(broker, config)
    assert min(done["asleep"], done["killed"]) > 3


async def test_one_store_of_a_run_directory_checks_alarms(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    class Checker:
        def __init__(self, config: Config, *_: object) -> None:
            self.name = config.log_level

        async def run(self) -> None:
            began.append(self.name)
            await anyio.sleep_forever()

    monkeypatch.setattr("store.service.Checker", Checker)
    monkeypatch.setattr("store.service._LOCK_RETRY_S", 0.05)

    def config(name: str) -> Config:
        return Config(run_dir=str(tmp_path), nats=nats_config, log_level=name)  # type: ignore[arg-type]

    async with anyio.create_task_group() as second, anyio.create_task_group() as both:
        ready = anyio.Event()
        async with anyio.create_task_group() as first:
            first.start_soon(serve, config("INFO"), lambda **_: None)
            await until_true(lambda: began)
            second.start_soon(serve, config("ERROR"), lambda **_: ready.set())
            await ready.wait()
            assert began == ["INFO"]
            first.cancel_scope.cancel()
        await until_true(lambda: len(began) >= 2)
        assert began == ["INFO", "ERROR"]
        both.cancel_scope.cancel()
        second.cancel_scope.cancel()
