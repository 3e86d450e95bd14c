"""A gateway without its HTTP front, before scriptable inference servers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from pipeline.config import Config, ModelConfig, NatsConfig, VllmConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.capture.registry import Registry
from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.serving.membership import Membership
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter
from tests.kits import sampler
from tests.kits.settings import with_values
from tests.rollout_gateway.conftest import PROJECT
from tests.rollout_gateway.fake_vllm import FakeVllm


def sampler_config(config: Config, url: str, folder: Path) -> Config:
    """Return the settings of the sampler agent of one server. `folder` is its own disk."""
    return with_values(config, {"vllm.urls": (url,), "run_dir": str(folder)})


class GatewayParts:
    """A gateway without its HTTP front."""

    def __init__(self, broker: Broker, config: Config, name: str) -> None:
        self.broker = broker
        self.policies = Policies(PROJECT, ["tictactoe"])
        self.fleet = Fleet(serving_share=config.gateway.replicas.serving_share)
        self.registry = Registry(broker, PROJECT, TrajectoryTokens(b"s" * 32, PROJECT))
        self.router = VersionRouter(self.policies, self.fleet)
        self.chat = CallHandler(config.gateway, self.fleet, self.router)
        self.members = Membership(config, broker, self.policies, self.fleet, self.router, name)

    async def call(self, trajectory: str = "", model: str = "tictactoe") -> tuple[int, Any]:
        body = msgspec.json.encode({"model": model, "messages": []})
        found = await self.registry.find(trajectory) if trajectory else None
        status, answer = await self.chat.answer(read_chat(body), Caller(found))
        return status, msgspec.json.decode(answer)

    async def open(self, name: str) -> None:
        event = TrajectoryOpened(project=PROJECT, trajectory=name, model="tictactoe", group="g")
        await self.registry.open(event, "")

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(60):
            while not condition():
                changed = self.fleet._changed
                await changed.wait()


def fleet_config(nats: NatsConfig, folder: Path, wait_s: float = 20, max_loras: int = 4, **settings: Any) -> Config:
    """Return settings of a gateway and of sampler agents. `settings` are those of the gateway."""
    config = Config(
        project=PROJECT,
        run_dir=str(folder),
        nats=nats,
        vllm=VllmConfig(max_loras=max_loras),
        models=(ModelConfig(name="tictactoe"),),
    )
    quick = {"replicas.wait_s": wait_s, "replicas.health_interval_s": 0.2, **settings}
    return msgspec.structs.replace(config, gateway=with_values(config.gateway, quick))


@asynccontextmanager
async def gateway_parts(config: Config, name: str) -> AsyncIterator[GatewayParts]:
    """Run a gateway without its HTTP front. It is connected to no inference server by itself."""
    async with Broker.connect(config.nats) as broker, anyio.create_task_group() as tg:
        made = GatewayParts(broker, config, name)
        await made.policies.rebuild(broker)
        tg.start_soon(made.members.run)
        tg.start_soon(made.policies.follow, broker, lambda recorded: made.members.policies_changed(recorded.event))
        yield made
        tg.cancel_scope.cancel()
    await made.fleet.disconnect()


@asynccontextmanager
async def parts(
    nats: NatsConfig, folder: Path, servers: list[FakeVllm], wait_s: float = 20, **settings: Any
) -> AsyncIterator[GatewayParts]:
    """Run a gateway without its HTTP front before these servers, each of which has a sampler agent."""
    config = fleet_config(nats, folder, wait_s, **settings)
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        made = await stack.enter_async_context(gateway_parts(config, "gw"))
        tg = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tg.cancel_scope.cancel)
        for number, server in enumerate(servers):
            await tg.start(sampler.run, sampler_config(config, server.url, folder / f"sampler-{number}"))
        await made.until(lambda: len(made.fleet.ready_replicas()) == len(servers))
        yield made
