"""Calls that end before their answer: clients that leave at once, and a gateway that stops."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.kit import ASK, Mortal, asking, exchanges, in_flight

pytestmark = pytest.mark.anyio


async def ask_and_leave(gateway: GatewayProcess, path: str, body: dict[str, Any], stay_s: float) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.url).port)
    writer.write(head.encode() + data)
    await writer.drain()
    await anyio.sleep(stay_s)  # what is tested: how soon the client leaves
    writer.close()
    await writer.wait_closed()


async def test_clients_that_leave_at_once_hold_no_server(
    start_gateway_alone: StartGateway, nats_config: NatsConfig
) -> None:
    """The server holds each call for ever, so the call ends only where the gateway ends it."""
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,))
        gateway.open(id="left")
        body = asking("hold", stream=False)
        async with anyio.create_task_group() as tg:
            for number in range(192):
                path = "/t/left/v1/chat/completions" if number % 2 else "/v1/chat/completions"
                tg.start_soon(ask_and_leave, gateway, path, body, number % 20 / 1000)
        await in_flight(gateway, 0, 0)
        async with Broker.connect(nats_config) as broker:
            assert {e.status for e in await exchanges(broker, "left")} <= {"cancelled"}


async def test_stopping_cuts_calls_with_an_error(start_gateway_alone: StartGateway, nats_config: NatsConfig) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), drain_s=1.0)
        gateway.open(id="cut")
        assert gateway.process is not None
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            cut: list[httpx.Response] = []

            async def held(path: str) -> None:
                body: Any = asking("hold", max_tokens=5)
                cut.append(await client.post(path, json=body))

            async with anyio.create_task_group() as tg:
                for path in ("/t/cut/v1/chat/completions", "/v1/chat/completions", "/t/cut/v1/messages"):
                    tg.start_soon(held, path)
                await in_flight(gateway, 3)
                gateway.process.send_signal(signal.SIGINT)
        assert sorted(r.status_code for r in cut) == [503] * 3
        assert {r.json()["error"].get("code", "theirs") for r in cut} == {"stopping", "theirs"}
        with anyio.fail_after(60):
            assert await anyio.to_thread.run_sync(gateway.process.wait) == 0
        async with Broker.connect(nats_config) as broker:
            events = await exchanges(broker, "cut")
        assert [(e.seq, e.status, e.policy_version) for e in events] == [
            (seq, "failed", "tictactoe@0") for seq in (0, 1)
        ]


@pytest.mark.vllm
async def test_a_stream_that_is_cut_ends_with_an_error_event(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway(drain_s=0.0)
    gateway.open(id="cut")
    assert gateway.process is not None
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
                    gateway.process.send_signal(signal.SIGINT)
    assert events[-1]["error"]["code"] == "stopping"
    assert await anyio.to_thread.run_sync(gateway.process.wait) == 0
    recorded = await exchanges(broker, "cut")
    assert {(e.seq, e.status) for e in recorded} == {(0, "failed")}


async def test_a_gateway_that_stops_refuses_new_calls_and_answers_those_that_end_in_time(
    start_gateway_alone: StartGateway,
) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), drain_s=300.0)
        assert gateway.process is not None
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            call = asyncio.ensure_future(client.post("/v1/chat/completions", json=asking("hold")))
            await in_flight(gateway, 1)
            gateway.process.send_signal(signal.SIGTERM)
            while (await client.post("/v1/chat/completions", json=asking("hello"))).status_code == 200:
                pass  # the signal is on its way
            refused = await client.post("/v1/chat/completions", json=asking("hello"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            assert refused.headers["retry-after"] == "1"
            theirs = await client.post("/v1/messages", json=asking("hello", max_tokens=5))
            assert (theirs.status_code, theirs.json()["type"]) == (503, "error")
            opening = await client.post("/v1/trajectories", json={"model": "tictactoe"})
            assert (opening.status_code, opening.json()["error"]["code"]) == (503, "stopping")
            with socket.create_connection(("127.0.0.1", server.port)) as straight:
                body = json.dumps(asking("release")).encode()
                straight.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
                )
            answer = await call
        # A client that did not know that the connection ends would send its next request into a closed one.
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        with anyio.fail_after(60):
            assert await anyio.to_thread.run_sync(gateway.process.wait) == 0
