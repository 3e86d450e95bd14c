"""`/health` tells whether the log takes writes."""

import signal
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api import log_health as loghealth
from rollout_gateway.api.gateway import ControlRequest
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.models import get_health
from rollout_gateway.serving.replicas import Fleet
from tests.conftest import NatsServer
from tests.kits.waiting import until


async def test_a_log_that_takes_no_writes_is_told(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loghealth, "PROBE_EVERY_S", 0.05)
    config = NatsConfig(url=nats_server.url, ack_timeout_s=0.5)
    assert nats_server.process is not None
    async with Broker.connect(config) as broker, anyio.create_task_group() as tg:
        fleet, health = Fleet(), LogHealth()
        fleet.add("http://127.0.0.1:1")
        gateway = cast(Any, SimpleNamespace(fleet=fleet, log_health=health))

        async def told(serving: bool) -> dict[str, Any]:
            now = await get_health(ControlRequest(gateway, cast(Any, None), Access(), []))
            return now if now["serving"] is serving else {}

        fleet.replicas[0].ready = True
        tg.start_soon(health.run, broker)
        assert await told(serving=True)
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            assert "ROLLOUTS did not take a write" in (await until(partial(told, serving=False)))["log"]
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        assert (await until(partial(told, serving=True)))["log"] == "ok"
        tg.cancel_scope.cancel()
