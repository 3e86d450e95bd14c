"""Fixtures: a store in this process, and object storage."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import AlarmsConfig, BudgetConfig, Config, NatsConfig, StoreConfig
from store.service import serve
from tests.store.kit import StoreProcess, create_bucket, fill, run_of_one_step, serving_s3


@pytest.fixture
def running_store(nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreProcess:
    """`async with running_store() as config`: a store in this process, stopped as by SIGTERM at the end. It checks no
    alarms unless `alarms` is given, and then as often as that says, however long a check takes."""
    monkeypatch.setattr("store.alarms.checker._PAUSE_FACTOR", 0)

    @asynccontextmanager
    async def run(
        alarms: AlarmsConfig | None = None, *, budget: BudgetConfig | None = None, **settings: Any
    ) -> AsyncIterator[Config]:
        store = StoreConfig(**({"flush_s": 0.2} | settings))
        checks: dict[str, Any] = {"alarms": alarms or AlarmsConfig(every_s=3600.0), "budget": budget or BudgetConfig()}
        config = Config(run_dir=str(tmp_path), nats=nats_config, store=store, **checks)
        (tmp_path / "store").mkdir(exist_ok=True)
        ready = anyio.Event()
        async with anyio.create_task_group() as tg:
            tg.start_soon(serve, config, lambda **_: ready.set())
            await ready.wait()
            yield config
            tg.cancel_scope.cancel()

    return run


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a history of one step. A test that changes it takes a copy."""
    folder = tmp_path_factory.mktemp("history")
    fill(folder, *run_of_one_step())
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3-compatible server with the bucket `journeywork`."""
    with serving_s3() as url:
        yield url


@pytest.fixture
def object_store(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of `[store]` for a prefix of a test's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    create_bucket(s3_server)
    return {"dir": f"s3://journeywork/{tmp_path.name}", "s3_endpoint": s3_server, "s3_region": "us-east-1"}
