"""Calls that end before their answer: clients that leave at once, and a gateway that stops."""

import asyncio
import json
import signal
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
import httpx
import pytest

from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import ASK, error, exchanges, in_flight


async def ask_and_leave(gateway: GatewayProcess, path: str, body: dict[str, Any], stay_s: float) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    writer.write(head.encode() + data)
    await writer.drain()
    await anyio.sleep(stay_s)  # what is tested: how soon the client leaves
    writer.close()
    await writer.wait_closed()


async def started(start: StartGateway, server: FakeVllm, **settings: Any) -> GatewayProcess:
    """A gateway whose inference server holds each call until its `held` is set."""
    gateway = await anyio.to_thread.run_sync(lambda: start(urls=(server.url,), **settings))
    server.held = asyncio.Event()
    return gateway


async def test_clients_that_leave_at_once_hold_no_server(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm, broker: Broker
) -> None:
    """The server holds each call for ever, so the call ends only where the gateway ends it."""
    gateway = await started(start_gateway_alone, fake_vllm)
    gateway.open(id="left")
    async with anyio.create_task_group() as tg:
        for number in range(192):
            path = "/t/left/v1/chat/completions" if number % 2 else "/v1/chat/completions"
            tg.start_soon(ask_and_leave, gateway, path, ASK, number % 20 / 1000)
    await in_flight(gateway, 0, 0)
    assert {e.status for e in await exchanges(broker, "left")} <= {"cancelled"}


async def test_stopping_cuts_calls_with_an_error(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm, broker: Broker
) -> None:
    gateway = await started(start_gateway_alone, fake_vllm, drain_s=1.0)
    gateway.open(id="cut")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        cut: list[httpx.Response] = []

        async def held(path: str) -> None:
            cut.append(await client.post(path, json=ASK))

        async with anyio.create_task_group() as tg:
            for path in ("/t/cut/v1/chat/completions", "/v1/chat/completions", "/t/cut/v1/messages"):
                tg.start_soon(held, path)
            await fake_vllm.called(3)
            gateway.send(signal.SIGINT)
    assert sorted(r.status_code for r in cut) == [503] * 3
    assert {r.json()["error"].get("code", "theirs") for r in cut} == {"stopping", "theirs"}
    assert await anyio.to_thread.run_sync(gateway.wait) == 0
    events = await exchanges(broker, "cut")
    assert [(e.seq, e.status, e.policy_version) for e in events] == [(seq, "failed", "tictactoe@0") for seq in (0, 1)]


@pytest.mark.vllm
async def test_a_stream_that_is_cut_ends_with_an_error_event(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway(drain_s=0.0)
    gateway.open(id="cut")
    body: Any = {**ASK, "max_tokens": 240, "n": 128, "stream": True, "ignore_eos": True}
    events: list[Any] = []
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        client.stream("POST", "/t/cut/v1/chat/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 1:  # once: a second SIGINT ends the process at once
                    gateway.send(signal.SIGINT)
    assert events[-1]["error"]["code"] == "stopping"
    assert await anyio.to_thread.run_sync(gateway.wait) == 0
    recorded = await exchanges(broker, "cut")
    assert {(e.seq, e.status) for e in recorded} == {(0, "failed")}


async def test_a_gateway_that_stops_refuses_new_calls_and_answers_those_that_end_in_time(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm
) -> None:
    gateway = await started(start_gateway_alone, fake_vllm, drain_s=300.0)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        call = asyncio.ensure_future(client.post("/v1/chat/completions", json=ASK))
        await fake_vllm.called(1)
        held, fake_vllm.held = fake_vllm.held, None
        gateway.send(signal.SIGTERM)
        while (refused := await client.post("/v1/chat/completions", json=ASK)).status_code == 200:
            pass  # the signal is on its way
        assert (error(refused), refused.headers["retry-after"]) == ((503, "stopping"), "1")
        theirs = await client.post("/v1/messages", json=ASK)
        assert (theirs.status_code, theirs.json()["type"]) == (503, "error")
        opening = await client.post("/v1/trajectories", json={"model": "tictactoe"})
        assert error(opening) == (503, "stopping")
        assert held is not None
        held.set()
        answer = await call
    # A client that did not know that the connection ends would send its next request into a closed one.
    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert await anyio.to_thread.run_sync(gateway.wait) == 0
