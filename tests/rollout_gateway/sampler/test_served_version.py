"""The version that a model name resolves to stays loaded until a newer one serves: no call is answered by an older
version than a call that was answered before it began."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import NatsConfig
from pipeline.names import parse_version
from tests.rollout_gateway.conftest import publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import GatewayParts, parts
from tests.rollout_gateway.kit import Calls, older_than_before

pytestmark = pytest.mark.anyio

SWAPS, LANES = 12, 2


class UnloadsNoted(FakeVllm):
    """Notes the versions that it is told to unload while the gateway's model name resolves to them."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway: GatewayParts | None = None
        self.unloaded_while_served: list[str] = []

    async def before(self, path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/unload_lora_adapter" and self.gateway is not None:
            version = body["lora_name"]
            if version == self.gateway.router.current("tictactoe"):
                self.unloaded_while_served.append(version)


async def call_until_last_swap(gateway: GatewayParts, lane: str, calls: Calls) -> None:
    await gateway.open(lane)
    step = 0
    while step < SWAPS:
        began = time.monotonic()
        status, answer = await gateway.call(lane)
        assert status == 200
        step = parse_version(answer["model"])[1]
        calls.append((began, time.monotonic(), step))


@pytest.mark.parametrize(("servers", "share"), [(1, 0.5), (2, 0.5), (2, 1.0)])
async def test_no_call_is_answered_by_an_older_version_than_one_before_it(
    nats_config: NatsConfig, tmp_path: Path, servers: int, share: float
) -> None:
    vllms = [UnloadsNoted() for _ in range(servers)]
    calls: Calls = []
    async with parts(nats_config, tmp_path, [*vllms], **{"replicas.serving_share": share}) as gateway:
        for vllm in vllms:
            vllm.gateway = gateway
        async with anyio.create_task_group() as lanes:
            for lane in range(LANES):
                lanes.start_soon(call_until_last_swap, gateway, f"lane-{lane}", calls)
            for step in range(1, SWAPS + 1):
                version = await publish_adapter(gateway.broker, step)
                await gateway.until(lambda v=version: gateway.router.current("tictactoe") == v)
    assert older_than_before(calls) == []
    assert [vllm.unloaded_while_served for vllm in vllms] == [[]] * servers


async def test_a_name_waits_for_the_version_that_it_resolved_to(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    """The only server with the newest version fails, and the other one has an older one."""
    fast, slow = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [fast, slow]) as gateway:
        await publish_adapter(gateway.broker, 1)
        await gateway.until(lambda: all(r.holds("tictactoe@1") for r in gateway.fleet.replicas))
        slow.loading = asyncio.Event()
        await publish_adapter(gateway.broker, 2)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@2")
        await fast.stop()
        await gateway.until(lambda: len(gateway.fleet.ready()) == 1)
        assert gateway.router.current("tictactoe") == "tictactoe@2"
        # A gateway that starts now has the same answer from the log.
        assert gateway.policies.newest_loaded("tictactoe") == "tictactoe@2"
        slow.loading.set()
        assert (await gateway.call())[1]["model"] == "tictactoe@2"
        await fast.start()
