"""The crash matrix over all services: 100 seeded deaths by `kill -9` while agents work, and nothing is lost
or doubled."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker, BrokerUnavailableError
from tests.conftest import NatsServer
from tests.kits.crash.agents import SEED
from tests.kits.crash.fork_server import ACK_WAIT_S, SERVICES
from tests.kits.crash.matrix import points_of, run_matrix, server_users, settings, violations
from tests.kits.quick_service import quick_consumers
from tests.trainer.conftest import tiny_base as tiny_base

pytestmark = pytest.mark.anyio

DEATHS = {"gateway": 20, "sampler": 10, "judge": 16, "trainer": 22, "store": 22}
"""Two at each stop point of a service, and four at the gateway's."""
KILLS = 10


@pytest.mark.timeout(1800)
@pytest.mark.slow
async def test_all_services_die_at_every_stop_point(
    start_nats: Callable[..., NatsServer], tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(ACK_WAIT_S, endless=True))
    server = start_nats(max_payload=32_768, extra=server_users(tmp_path))
    config = settings(
        NatsConfig(url=server.url, connect_timeout_s=60, publish_deadline_s=60, ack_timeout_s=2.0), tiny_base, tmp_path
    )

    async def kill_servers() -> int:
        rng = random.Random(f"{SEED}/nats")
        for _ in range(KILLS):
            await anyio.sleep(rng.uniform(0.5, 2.5))  # the schedule: when it dies
            server.kill()
            await anyio.to_thread.run_sync(server.start)
        return KILLS

    # A start that finds no server gives up, as a supervisor expects: that is no service's fault here.
    matrix = await run_matrix(config, DEATHS, kill_servers, may_give_up=KILLS, least=(80, 20))
    missed = {(s, p) for s in SERVICES for p in points_of(s)} - set(matrix.endings.at)
    assert not missed, f"no process died at {missed}"
    assert matrix.endings.at.total() >= 90, f"not reached: {matrix.endings.elsewhere}"
    assert violations(server.log) == []


async def test_the_server_logs_what_it_refuses(start_nats: Callable[..., NatsServer], tmp_path: Path) -> None:
    """What the crash matrix looks for in the server's log."""
    server = start_nats(extra=server_users(tmp_path))
    config = NatsConfig(url=server.url, users=str(tmp_path / "keys"), provision=False)
    async with Broker.connect(config, name="store") as broker:
        await broker.client.publish("policy.checkpoint.p.m.1", b"forged")
        await broker.client.flush()
    with pytest.raises(BrokerUnavailableError):
        async with Broker.connect(NatsConfig(url=server.url), provision=False):
            pass
    publish, *connects = violations(server.log)
    assert "policy.checkpoint.p.m.1" in publish
    assert connects  # one for each try
