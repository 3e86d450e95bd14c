"""Two gateways and three inference servers whose sampler agents have a disk each: swaps under calls, while a server is
added and another one removed."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, PolicyLoaded, PolicyUnloaded
from pipeline.log import key_value
from pipeline.log.broker import Broker
from pipeline.names import parse_version, subject_token
from pipeline.streams import replica_name, sampler_key
from tests.conftest import NatsServer
from tests.kits.power import Power
from tests.kits.sampler import SamplerThread
from tests.kits.waiting import until_true
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import GatewayParts, fleet_config, gateway_parts, parts, sampler_config
from tests.rollout_gateway.kit import Calls, older_than_before

SWAPS, LANES = 12, 2


class UnloadsNoted(FakeVllm):
    """Notes the versions that it is told to unload while the model name resolves to them at a gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.gateways: list[GatewayParts] = []
        self.unloaded_while_served: list[str] = []

    async def before(self, path: str, body: Any) -> None:
        if path == "/v1/unload_lora_adapter":
            version, served = body["lora_name"], {g.router.current("tictactoe") for g in self.gateways}
            self.unloaded_while_served += served & {version}


async def call_until(gateway: GatewayParts, lane: str, stop: anyio.Event, wrong: list[str], calls: Calls) -> None:
    """Make one call after the other of a trajectory. Each must be answered with the adapter that its label names."""
    await gateway.open(lane)
    while not stop.is_set():
        began = time.monotonic()
        status, answer = await gateway.call(lane)
        calls.append((began, time.monotonic(), parse_version(answer.get("model", "?@-1"))[1]))
        made_with = "" if status != 200 else answer["choices"][0]["message"]["content"]
        if not made_with.startswith(subject_token(answer.get("model", "?"))) and answer["model"] != "tictactoe@0":
            wrong.append(f"{status} {answer}")


async def test_swaps_while_a_server_joins_and_another_leaves(nats_config: NatsConfig, tmp_path: Path) -> None:
    """Each call is answered by the version that its record names. The version that a model name resolves to stays
    loaded until a newer one serves: no call is answered by an older version than one that had ended when it began."""
    servers = [UnloadsNoted() for _ in range(3)]
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
        for server in servers:
            server.gateways = gateways
        wrong: list[str] = []
        calls: list[Calls] = [[] for _ in gateways]
        stop = anyio.Event()
        async with anyio.create_task_group() as tg:
            for number, gateway in enumerate(gateways):
                for lane in range(LANES):
                    tg.start_soon(call_until, gateway, f"lane-{number}-{lane}", stop, wrong, calls[number])
            for step in range(1, SWAPS + 1):
                version = await publish_adapter(gateways[0].broker, step)
                for gateway in gateways:
                    await gateway.until(lambda g=gateway, v=version: g.router.current("tictactoe") == v)
                if step == SWAPS // 3:
                    await anyio.to_thread.run_sync(agents[2].start)
                    for gateway in gateways:
                        await gateway.until(lambda g=gateway: len(g.fleet.ready_replicas()) == 3)
                if step == 2 * SWAPS // 3:
                    await anyio.to_thread.run_sync(agents[0].stop)
                    for gateway in gateways:
                        await gateway.until(lambda g=gateway: len(g.fleet.replicas) == 2)
            stop.set()
        assert wrong == []
        assert [older_than_before(of_gateway) for of_gateway in calls] == [[], []]
        assert [server.unloaded_while_served for server in servers] == [[], [], []]
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
    nats_config: NatsConfig, tmp_path: Path, fake_vllm: FakeVllm
) -> None:
    config = fleet_config(nats_config, tmp_path)
    async with Broker.connect(nats_config) as log, gateway_parts(config, "gw") as gateway:
        record = b'{"url": "%s", "models": ["tictactoe"], "server_start": "1"}' % fake_vllm.url.encode()
        key = sampler_key(PROJECT, replica_name(fake_vllm.url))
        await key_value.put(log, streams.FLEET.name, key, record, 6)
        await gateway.until(gateway.fleet.ready_replicas)
        assert (await gateway.call())[0] == 200
        await gateway.until(lambda: not gateway.fleet.replicas)


async def test_a_log_that_lost_an_unload_is_corrected_and_calls_are_answered(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path, fake_vllm: FakeVllm
) -> None:
    """The log's server loses its last events in a power cut, while the inference server stays up."""
    power = Power(nats_server, tmp_path)
    config = fleet_config(nats_config, tmp_path, max_loras=2)
    agent = SamplerThread(sampler_config(config, fake_vllm.url, tmp_path / "disk"))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(anyio.to_thread.run_sync, agent.stop)
        await anyio.to_thread.run_sync(agent.start)
        for step, lost in ((1, False), (2, False), (3, True)):
            if lost:
                await power.synced()
            async with gateway_parts(config, "gw") as gateway:
                version = await publish_adapter(gateway.broker, step)
                await gateway.until(lambda g=gateway, v=version: g.router.current("tictactoe") == v)
        await anyio.to_thread.run_sync(agent.stop)
        assert fake_vllm.loaded.keys() == {"tictactoe@2", "tictactoe@3"}
        await power.cut()
        async with Broker.connect(nats_config) as log:
            assert [r.event.step for r in await log.read(PolicyLoaded)] == [1, 2]
            assert await log.read(PolicyUnloaded) == []
        await anyio.to_thread.run_sync(agent.start)
        async with gateway_parts(config, "gw") as gateway:
            status, answer = await gateway.call()
            assert (status, answer["model"]) == (200, "tictactoe@2")
            (unloaded,) = await gateway.broker.read(PolicyUnloaded)
            assert unloaded.event.version == "tictactoe@1"


async def test_adapters_that_the_server_does_not_have_loaded_are_deleted(
    nats_config: NatsConfig, tmp_path: Path, fake_vllm: FakeVllm
) -> None:
    """After a restart of the server, a failed check and a restart of the agent, too, they stayed on the disk."""
    config = fleet_config(nats_config, tmp_path, max_loras=2)
    settings = sampler_config(config, fake_vllm.url, tmp_path)
    agent = SamplerThread(settings)
    folder = settings.path(settings.sampler.adapters)

    async def unpacked(*steps: int) -> None:
        """Wait until adapters of these steps are on the disk, and no others."""
        names = [f"tictactoe@{step}" for step in steps]
        await until_true(lambda: sorted(path.name.partition("-")[0] for path in folder.iterdir()) == names)

    async with gateway_parts(config, "gw") as gateway:

        async def serve(step: int) -> None:
            version = await publish_adapter(gateway.broker, step)
            await gateway.until(lambda: gateway.router.current("tictactoe") == version)

        await anyio.to_thread.run_sync(agent.start)
        for step in (1, 2, 3):
            await serve(step)
        await unpacked(2, 3)
        await fake_vllm.stop()  # it loses its adapters
        await fake_vllm.start()
        await serve(4)
        await unpacked(3, 4)
        fake_vllm.disk = tmp_path / "another"  # so it refuses the next adapter
        await publish_adapter(gateway.broker, 5)
        await gateway.until(lambda: any("tictactoe@5" in r.refused for r in gateway.fleet.replicas))
        fake_vllm.disk = None
        await serve(6)
        await unpacked(4, 6)
        await anyio.to_thread.run_sync(agent.stop)
        await fake_vllm.stop()
        await fake_vllm.start()
        await anyio.to_thread.run_sync(agent.start)
        await unpacked(6)
        await anyio.to_thread.run_sync(agent.stop)


async def test_a_name_waits_for_the_version_that_it_resolved_to(nats_config: NatsConfig, tmp_path: Path) -> None:
    """The only server with the newest version fails, and the other one has an older one."""
    fast, slow = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [fast, slow]) as gateway:
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: all(r.holds("tictactoe@1") for r in gateway.fleet.replicas))
        slow.loading = asyncio.Event()
        await publish_adapter(gateway.broker, 2)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@2")
        await fast.stop()
        await gateway.until(lambda: len(gateway.fleet.ready_replicas()) == 1)
        assert gateway.router.current("tictactoe") == "tictactoe@2"
        # A gateway that starts now has the same answer from the log.
        assert gateway.policies.newest_loaded_anywhere("tictactoe") == "tictactoe@2"
        slow.loading.set()
        assert (await gateway.call())[1]["model"] == "tictactoe@2"
        await fast.start()
