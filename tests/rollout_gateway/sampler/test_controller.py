"""What an agent that restarts makes of the adapters that it finds in its inference server."""

from pathlib import Path
from typing import Any

from pipeline.config import NatsConfig
from pipeline.events import CheckpointPublished, PolicyLoaded, PolicyUnloaded
from pipeline.log.broker import Broker
from pipeline.streams import replica_name
from rollout_gateway.sampler.adapter_files import AdapterFiles
from rollout_gateway.sampler.controller import SamplerContext, ServerController
from rollout_gateway.sampler.gateway_records import GatewayRecords
from rollout_gateway.serving.policies import Policies
from tests.kits.events import loaded
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import fleet_config


def loaded_by(server: FakeVllm, published: CheckpointPublished) -> PolicyLoaded:
    of_server = {"replica": replica_name(server.url), "server_start": str(server.life)}
    digest = published.adapter_sha256
    return loaded(published.step, "tictactoe", project=PROJECT, adapter_sha256=digest, **of_server)


class Agent:
    """A sampler agent of one server, up to its first contact with the server."""

    def __init__(self, broker: Broker, config: Any, server: FakeVllm, folder: Path) -> None:
        self.policies = Policies(PROJECT, ["tictactoe"])
        self.files = AdapterFiles(folder, broker)
        context = SamplerContext(config, broker, self.policies, GatewayRecords(PROJECT), self.files)
        self.controller = ServerController(context, server.url, server.url, self.delete_unused)
        self.broker = broker

    async def delete_unused(self) -> None:
        """As the service does."""
        inherited = bool(self.controller.server_start)
        await self.files.delete_unused(self.controller.folders, inherited=inherited)

    async def reach_server(self) -> None:
        await self.policies.rebuild(self.broker)
        await self.controller._handshake()


async def test_what_a_restarted_agent_finds_in_its_server_stays_on_the_disk_until_it_is_adopted(
    broker: Broker, nats_config: NatsConfig, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """Version 1 was loaded by an agent that died before it published that. Version 2 is on the log as loaded, what
    the server has as version 3 is not the published adapter, and it has an adapter of a user's own."""
    config, disk = fleet_config(nats_config, tmp_path), tmp_path / "disk"
    for step in (1, 2, 3):
        await publish_adapter(broker, step)
    earlier = Agent(broker, config, fake_vllm, disk)
    await earlier.policies.rebuild(broker)
    events = {v: c.event for v in earlier.policies.versions("tictactoe") if (c := earlier.policies.checkpoint(v))}
    folders = {
        version: await earlier.files.ensure(version, event.adapter, event.adapter_sha256, event.files)
        for version, event in events.items()
    }
    folders["tictactoe@3"] = folders["tictactoe@3"].rename(earlier.files.path("tictactoe@3", "f" * 64))
    fake_vllm.loaded = {version: str(folder) for version, folder in folders.items()} | {"mine": "/mine"}
    await broker.publish(loaded_by(fake_vllm, events["tictactoe@2"]))

    agent = Agent(broker, config, fake_vllm, disk)
    probed: list[str] = []
    left: list[set[Path]] = []

    async def before(path: str, body: Any) -> None:
        if path == "/v1/completions":
            probed.append(body["model"])
            await agent.delete_unused()  # as the controller of another server may do meanwhile
            left.append(set(disk.iterdir()))

    fake_vllm.before = before  # type: ignore[method-assign, assignment]
    await agent.delete_unused()  # no server was reached yet: nothing of the agent before it is deleted
    assert set(disk.iterdir()) == set(folders.values())
    await agent.reach_server()
    adopted = ("tictactoe@1", "tictactoe@2")
    assert probed == ["tictactoe@0", "tictactoe@1"]
    assert left == [set(folders.values())] * 2
    assert agent.controller.loaded == {version: str(folders[version]) for version in adopted}
    assert fake_vllm.loaded.keys() == {*adopted, "mine"}
    on_log = [r.event.version for r in await broker.read(PolicyLoaded)]
    assert on_log == ["tictactoe@2", "tictactoe@1"]
    await agent.delete_unused()
    assert set(disk.iterdir()) == {folders[version] for version in adopted}
    await agent.controller._server.close()


async def test_an_adapter_that_a_restarted_agent_finds_and_that_fails_the_probe_is_unloaded(
    broker: Broker, nats_config: NatsConfig, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    await publish_adapter(broker, 1)
    agent = Agent(broker, fleet_config(nats_config, tmp_path), fake_vllm, tmp_path / "disk")
    await agent.policies.rebuild(broker)
    checkpoint = agent.policies.checkpoint("tictactoe@1")
    assert checkpoint is not None
    fake_vllm.loaded = {"tictactoe@1": str(agent.files.path("tictactoe@1", checkpoint.event.adapter_sha256))}
    agent.controller._base_logprobs["tictactoe@0"] = [{"token_id:1": -2.0}] * 4  # as with the adapter
    agent.controller.server_start = str(fake_vllm.life)
    await agent.reach_server()
    assert (agent.controller.loaded, fake_vllm.loaded) == ({}, {})
    assert await broker.read(PolicyLoaded) == []
    await agent.controller._server.close()


async def test_what_the_log_says_beyond_what_the_server_holds_is_corrected_at_the_next_check(
    broker: Broker, nats_config: NatsConfig, fake_vllm: FakeVllm, tmp_path: Path
) -> None:
    """The log lost a `policy.unloaded` before its own agent had read it."""
    await publish_adapter(broker, 1)
    agent = Agent(broker, fleet_config(nats_config, tmp_path), fake_vllm, tmp_path / "disk")
    await agent.reach_server()
    (published,) = await broker.read(CheckpointPublished)
    await broker.publish(loaded_by(fake_vllm, published.event))
    await agent.policies.rebuild(broker)
    agent.controller.loaded["mine"] = fake_vllm.loaded["mine"] = "/mine"
    await agent.controller._check()
    assert [r.event.version for r in await broker.read(PolicyUnloaded)] == ["tictactoe@1"]
    await agent.controller._server.close()
