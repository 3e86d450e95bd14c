"""A sampler agent whose settings change while it runs."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from pipeline.config import NatsConfig, load, save, with_values
from pipeline.running import reload
from rollout_gateway.serving.fleet_records import replica_name
from tests.kits import sampler
from tests.rollout_gateway.conftest import publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm, fleet_config, gateway_parts, sampler_config

pytestmark = pytest.mark.anyio


async def test_a_changed_list_of_servers_holds_without_a_restart(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "CHECK_S", 0.02)
    servers = [FakeVllm(), FakeVllm()]
    for server in servers:
        await server.start()
        server.disk = tmp_path
    path = tmp_path / "config.toml"
    config = sampler_config(fleet_config(nats_config, tmp_path), servers[0].url, tmp_path)
    save(config, path)

    async def write(*urls: str) -> None:
        save(with_values(config, {"vllm.urls": urls}), path)

    async with gateway_parts(config, "gw") as gateway, anyio.create_task_group() as tasks:

        async def until_served_by(*wanted: FakeVllm) -> None:
            names = {replica_name(server.url) for server in wanted}
            await gateway.until(lambda: {replica.name for replica in gateway.fleet.ready()} == names)
            assert (await gateway.call())[0] == 200

        await tasks.start(sampler.run, load(path))
        tasks.start_soon(reload.watch_service, str(path), (), load(path))
        await until_served_by(servers[0])
        await write(*(server.url for server in servers))
        await until_served_by(*servers)
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@1")
        await write(servers[1].url)
        await until_served_by(servers[1])
        await write()  # an agent needs a server
        with anyio.fail_after(30):
            while "the servers stay as they are" not in caplog.text:
                await anyio.sleep(0.01)
        await write(servers[0].url)
        await until_served_by(servers[0])
        assert servers[0].loaded  # it was taken over with its adapter
        tasks.cancel_scope.cancel()
    for server in servers:
        await server.stop()
