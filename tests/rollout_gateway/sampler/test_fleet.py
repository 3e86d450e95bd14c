"""Two gateways and three inference servers whose sampler agents have a disk each: swaps under calls, while a server is
added and another one removed."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, PolicyLoaded
from pipeline.log import key_value
from pipeline.log.broker import Broker
from pipeline.names import subject_token
from rollout_gateway.serving.fleet_records import replica_name, sampler_key
from tests.kits.sampler import SamplerThread
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.fake_vllm import (
    FakeVllm,
    GatewayParts,
    fleet_config,
    gateway_parts,
    sampler_config,
)

pytestmark = pytest.mark.anyio

SWAPS, LANES = 24, 4


async def call_until(gateway: GatewayParts, lane: str, stop: anyio.Event, wrong: list[str]) -> None:
    """Make one call after the other of a trajectory. Each must be answered with the adapter that its label names."""
    await gateway.open(lane)
    while not stop.is_set():
        status, answer = await gateway.call(lane)
        made_with = "" if status != 200 else answer["choices"][0]["message"]["content"]
        if (
            not made_with.startswith(subject_token(answer.get("model", "?")))
            and answer["model"] != "tictactoe@0"
        ):
            wrong.append(f"{status} {answer}")


async def test_swaps_while_a_server_joins_and_another_leaves(nats_config: NatsConfig, tmp_path: Path) -> None:
    servers = [FakeVllm(), FakeVllm(), FakeVllm()]
    config = fleet_config(nats_config, tmp_path, max_loras=2)
    agents = []
    async with AsyncExitStack() as stack:
        for number, server in enumerate(servers):
            await server.start()
            stack.push_async_callback(server.stop)
            server.disk = tmp_path / f"disk-{number}"
            agents.append(SamplerThread(sampler_config(config, server.url, server.disk)))
        for agent in agents[:2]:
            await anyio.to_thread.run_sync(agent.start)
        for agent in agents:
            stack.push_async_callback(anyio.to_thread.run_sync, agent.stop)
        gateways = [await stack.enter_async_context(gateway_parts(config, f"gw-{n}")) for n in range(2)]
        wrong: list[str] = []
        stop = anyio.Event()
        async with anyio.create_task_group() as calls:
            for number, gateway in enumerate(gateways):
                for lane in range(LANES):
                    calls.start_soon(call_until, gateway, f"lane-{number}-{lane}", stop, wrong)
            for step in range(1, SWAPS + 1):
                version = await publish_adapter(gateways[0].broker, step)
                for gateway in gateways:
                    await gateway.until(lambda g=gateway, v=version: g.router.current("tictactoe") == v)
                if step == SWAPS // 3:
                    await anyio.to_thread.run_sync(agents[2].start)
                    for gateway in gateways:
                        await gateway.until(lambda g=gateway: len(g.fleet.ready()) == 3)
                if step == 2 * SWAPS // 3:
                    await anyio.to_thread.run_sync(agents[0].stop)
                    for gateway in gateways:
                        await gateway.until(lambda g=gateway: len(g.fleet.replicas) == 2)
            stop.set()
        assert wrong == []
        broker = gateways[0].broker
        recorded = [
            r.event
            for number in range(2)
            for lane in range(LANES)
            for r in await broker.read(ExchangeRecorded, project=PROJECT, trajectory=f"lane-{number}-{lane}")
        ]
        assert {e.status for e in recorded} == {"complete"}
        assert set(Counter(r.event.replica for r in await broker.read(PolicyLoaded))) == {
            replica_name(s.url) for s in servers
        }
        assert all(len(s.loaded) <= 2 for s in servers)


async def test_a_server_whose_agent_died_gets_no_calls_when_its_record_has_expired(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    server = FakeVllm()
    await server.start()
    config = fleet_config(nats_config, tmp_path)
    async with Broker.connect(nats_config) as log, gateway_parts(config, "gw") as gateway:
        record = b'{"url": "%s", "models": ["tictactoe"], "server_start": "1"}' % server.url.encode()
        key = sampler_key(PROJECT, replica_name(server.url))
        await key_value.put(log, streams.FLEET.name, key, record, 1)
        await gateway.until(gateway.fleet.ready)
        assert (await gateway.call())[0] == 200
        await gateway.until(lambda: not gateway.fleet.replicas)
    await server.stop()
