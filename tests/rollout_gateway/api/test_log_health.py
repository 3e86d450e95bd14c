"""`/health` tells whether the log takes writes."""

from __future__ import annotations

import signal

import anyio
import pytest

from pipeline.config import GatewayConfig, NatsConfig
from pipeline.log.broker import Broker
from pipeline.names import new_id
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api import log_health as loghealth
from rollout_gateway.api.control import Control
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.capture.trajectories import Registry
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import Router
from tests.conftest import NatsServer

pytestmark = pytest.mark.anyio


async def test_a_log_that_takes_no_writes_is_told(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loghealth, "PROBE_EVERY_S", 0.05)
    config = NatsConfig(url=nats_server.url, ack_timeout_s=0.5)
    assert nats_server.process is not None
    async with Broker.connect(config) as broker, anyio.create_task_group() as tg:
        project, fleet, health = new_id("p"), Fleet(("http://127.0.0.1:1",)), LogHealth()
        policies = Policies(project, ["m"])
        registry = Registry(broker, project, TrajectoryTokens(b"s" * 32, project))
        control = Control(
            project,
            GatewayConfig(),
            policies,
            fleet,
            registry,
            Router(policies, fleet),
            Pacing(project, 0),
            health,
        )
        fleet.replicas[0].ready = True
        tg.start_soon(health.run, broker)
        assert control.health(None)["serving"] is True
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            with anyio.fail_after(20):
                while control.health(None)["serving"]:
                    await anyio.sleep(0.05)
            assert "ROLLOUTS did not take a write" in control.health(None)["log"]
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        with anyio.fail_after(20):
            while not control.health(None)["serving"]:
                await anyio.sleep(0.05)
        assert control.health(None)["log"] == "ok"
        tg.cancel_scope.cancel()
