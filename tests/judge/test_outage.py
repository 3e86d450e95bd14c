"""A judge whose model never answers. `tests/test_crash.py` kills judges and the log's server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from judge.service import serve
from pipeline.config import Config, JudgeConfig, NatsConfig
from pipeline.log.broker import Broker
from tests.judge.kit import completed, exchange, groups
from tests.kits.scoring_server import ScoringServer
from tests.kits.settings import with_values

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("quick_redelivery")]


@asynccontextmanager
async def serving(folder: Path, nats: NatsConfig, **judge: Any) -> AsyncIterator[None]:
    """A judge that serves within the block."""
    started = anyio.Event()
    config = Config(nats=nats, run_dir=str(folder), judge=with_values(JudgeConfig(), judge))
    async with anyio.create_task_group() as tg:
        tg.start_soon(serve, config, lambda **_: started.set())
        await started.wait()
        yield
        tg.cancel_scope.cancel()


async def play(broker: Broker, group: str, reward: float | None = None) -> None:
    for name in (f"{group}-{member}" for member in range(4)):
        await broker.publish(exchange(name, "quality=0.5"))
        await broker.publish(completed(name, group, reward, group_size=4, exchanges=1))


async def drained(broker: Broker) -> None:
    with anyio.fail_after(120):
        while await broker.lag("judge"):
            await anyio.sleep(0.05)  # the server can only be asked


async def test_a_group_whose_judge_model_never_answers_is_recorded(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path
) -> None:
    async with ScoringServer(lambda _: 500).run() as server:
        model = {"model": "openai/scorer", "api_base": server.url, "retry_for_s": 1.0, "request.retries": 0}
        async with serving(tmp_path, nats_config, **model):
            await play(broker, "g")
            (event,) = await groups(broker, 1, "discarded")
            await drained(broker)
    assert event.reason == "unscored"
    assert "InternalServerError" in event.detail
