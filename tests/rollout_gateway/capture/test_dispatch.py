"""Waiting for an inference server: it ends with the request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline.config import NatsConfig
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.dialects.endpoints import CHAT
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping
from tests.rollout_gateway.fake_vllm import FakeVllm, parts
from tests.rollout_gateway.kit import exchanges

pytestmark = pytest.mark.anyio

CALL = CHAT.read(msgspec.json.encode({"model": "tictactoe", "messages": []}))


async def test_a_client_that_leaves_before_a_server_was_asked_is_not_recorded(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        await server.stop()
        gateway.fleet.replicas[0].suspect()
        await gateway.open("t")
        caller = Caller(await gateway.registry.find("t"))
        asyncio.get_running_loop().call_soon(caller.cancellation.cancel, ClientGoneError())
        with anyio.fail_after(10), pytest.raises(ClientGoneError):
            await gateway.chat.plain(CHAT, CALL, caller)
        assert caller.trajectory is not None
        assert caller.trajectory.in_flight == 0
        assert await exchanges(gateway.broker, "t") == []
        await server.start()


@pytest.mark.parametrize(("error", "status"), [(ClientGoneError(), "cancelled"), (stopping(), "failed")])
async def test_a_call_that_is_ended_while_its_server_works_is_recorded(
    nats_config: NatsConfig, tmp_path: Path, error: Exception, status: str
) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        server.held = asyncio.Event()
        await gateway.open("t")
        caller = Caller(await gateway.registry.find("t"))
        call = asyncio.ensure_future(gateway.chat.plain(CHAT, CALL, caller))
        with anyio.fail_after(10):
            while not server.calls:
                await anyio.sleep(0.01)  # until the server has the call
        caller.cancellation.cancel(error)
        with anyio.fail_after(10), pytest.raises((ClientGoneError, ApiError)):
            await call
        (event,) = await exchanges(gateway.broker, "t")
        assert (event.status, event.policy_version, event.sampled_ids) == (status, "tictactoe@0", b"")
        assert gateway.fleet.replicas[0].load == 0
        server.held.set()
