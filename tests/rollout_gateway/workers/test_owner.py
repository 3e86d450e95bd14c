"""A gateway of two processes, as its clients and its supervisor see it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import Config, GatewayConfig, HttpConfig, NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.service import share_limits
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.kit import Mortal, asking, exchanges

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connection_to(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    """A client that keeps one connection."""
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60, trust_env=False) as client:
        yield client


async def figures(gateway: GatewayProcess, name: str) -> dict[str, float]:
    """The values of a metric by worker, its other labels added up."""
    async with connection_to(gateway) as client:
        text = (await client.get("/metrics")).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                worker = sample.labels["worker"]
                found[worker] = found.get(worker, 0) + sample.value
    return found


def workers(gateway: GatewayProcess) -> dict[int, int]:
    """Process ids of the workers by number."""
    lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    return {line["number"]: line["pid"] for line in lines if line["event"] == "worker ready"}


async def call(client: httpx.AsyncClient, run: str, text: str) -> httpx.Response:
    return await client.post(f"/t/{run}/v1/chat/completions", json=asking(text))


@pytest.mark.slow
async def test_a_killed_worker_loses_no_acknowledged_call_and_the_other_goes_on(
    start_gateway_alone: StartGateway, nats_config: NatsConfig
) -> None:
    """Eight agents call over connections that they keep. Each call that was answered is on the log."""
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        runs = [f"run-{number}" for number in range(8)]
        for run in runs:
            gateway.open(id=run)
        answered: dict[str, int] = dict.fromkeys(runs, 0)
        killed = asyncio.Event()
        enough = asyncio.Event()

        async def agent(run: str) -> None:
            after = 0
            while after < 5:
                async with connection_to(gateway) as client:
                    try:
                        while after < 5:
                            reply = await call(client, run, f"call {answered[run]}")
                            assert reply.status_code == 200, reply.text
                            answered[run] += 1
                            after += killed.is_set()
                            if min(answered.values()) >= 5:
                                enough.set()
                    except httpx.TransportError:
                        continue  # its worker was killed: not acknowledged

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tg:
                for run in runs:
                    tg.start_soon(agent, run)
                await enough.wait()
                taken = await figures(gateway, "journeywork_calls_total")
                os.kill(workers(gateway)[1], signal.SIGKILL)
                killed.set()
            while (await figures(gateway, "journeywork_worker_up")) != {"1": 1, "2": 1}:
                await anyio.sleep(0.05)  # until the owner has started it again
        assert min(taken["1"], taken["2"]) >= 4 * 5  # connections are divided evenly
        assert await figures(gateway, "journeywork_worker_restarts_total") == {"1": 1, "2": 0}
        async with Broker.connect(nats_config) as broker:
            for run in runs:
                recorded = await exchanges(broker, run)
                assert [event.seq for event in recorded] == list(range(len(recorded)))
                asked = {json.loads(bytes(event.request))["messages"][-1]["content"] for event in recorded}
                assert asked >= {f"call {number}" for number in range(answered[run])}
        done = [gateway.complete(run, reward=1.0).json() for run in runs]
        assert all(d["exchanges"] >= answered[d["id"]] for d in done)


@pytest.mark.slow
async def test_calls_of_one_run_may_come_to_any_worker(
    start_gateway_alone: StartGateway, nats_config: NatsConfig
) -> None:
    """Calls at the same time on both workers get different numbers, and any worker completes the run."""
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        async with connection_to(gateway) as a, connection_to(gateway) as b, connection_to(gateway) as c:
            opened = await a.post("/v1/trajectories", json={"model": "tictactoe", "id": "one"})
            assert opened.status_code == 201
            for number in range(10):
                replies = await asyncio.gather(call(a, "one", f"a{number}"), call(b, "one", f"b{number}"))
                assert [r.status_code for r in replies] == [200, 200], [r.text for r in replies]
            assert min((await figures(gateway, "journeywork_calls_total")).values()) >= 10
            listed = [(await client.get("/v1/trajectories")).json() for client in (a, b)]
            assert listed[0] == listed[1]
            assert [(t["id"], t["exchanges"]) for t in listed[0]["data"]] == [("one", 20)]
            done = await c.post("/v1/trajectories/one/complete", json={"reward": 1.0})
            assert (done.json()["exchanges"], done.json()["calls"]) == (20, 20)
            with anyio.fail_after(30):
                for client in (a, b):
                    while (reply := await call(client, "one", "late")).status_code == 200:
                        await anyio.sleep(0.01)  # until the worker has read of the completion
                    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "trajectory_completed")


@pytest.mark.slow
async def test_a_call_in_flight_is_not_recorded_after_another_worker_completed_its_run(
    start_gateway_alone: StartGateway, nats_config: NatsConfig
) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        async with (
            connection_to(gateway) as a,
            connection_to(gateway) as b,
            connection_to(gateway) as beside_a,
        ):
            for client in (
                a,
                b,
                beside_a,
            ):  # in this order: the third connection goes to the worker of the first
                await client.get("/ping")
            gateway_run = (await b.post("/v1/trajectories", json={"model": "tictactoe"})).json()["id"]
            held = asyncio.ensure_future(call(a, gateway_run, "hold"))
            with anyio.fail_after(60):
                while sum((await figures(gateway, "journeywork_replica_calls")).values()) < 1:
                    await anyio.sleep(0.02)  # until the server has it
                done = await b.post(f"/v1/trajectories/{gateway_run}/complete", json={"reward": 1.0})
                assert done.json()["exchanges"] == 0
                while (await call(beside_a, gateway_run, "late")).status_code == 200:
                    await anyio.sleep(0.01)  # until the worker has read of the completion
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as direct:
                await direct.post("/v1/chat/completions", json={**asking("release"), "model": "tictactoe@0"})
            reply = await held
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "trajectory_completed")
        async with Broker.connect(nats_config) as broker:
            assert "hold" not in str(await exchanges(broker, gateway_run))


async def test_a_decision_made_by_one_worker_holds_at_the_others(start_gateway_alone: StartGateway) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        async with connection_to(gateway) as a, connection_to(gateway) as b:
            for client in (a, b):
                await client.get("/ping")  # each has a worker of its own
            pinned = await a.post(
                "/v1/policies/tictactoe/pin", json={"version": "tictactoe@0", "reason": "test"}
            )
            assert pinned.status_code == 200, pinned.text
            with anyio.fail_after(30):
                for client in (a, b):
                    while True:
                        (policy,) = (await client.get("/v1/policies")).json()["data"]
                        if policy["decision"] is not None:
                            break
                        await anyio.sleep(0.01)  # until the worker has read of it
                    assert (policy["decision"]["action"], policy["decision"]["reason"]) == ("pin", "test")


def test_limits_of_the_gateway_are_divided_among_its_workers() -> None:
    limits = HttpConfig(max_connections=10, max_buffered_bytes=3000, max_body_bytes=1000)
    shared = share_limits(Config(gateway=GatewayConfig(workers=4, max_calls=9, http=limits))).gateway
    assert (shared.max_calls, shared.http.max_connections) == (3, 3)
    assert shared.http.max_buffered_bytes == 1000  # one body always fits
    alone = Config(gateway=GatewayConfig(http=limits))
    assert share_limits(alone) == alone


@pytest.mark.slow
async def test_stopping_the_gateway_lets_the_calls_of_every_worker_end(
    start_gateway_alone: StartGateway,
) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        assert gateway.process is not None
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        assert len(children) == 2
        async with connection_to(gateway) as a, connection_to(gateway) as b:
            held = [
                asyncio.ensure_future(client.post("/v1/chat/completions", json=asking("hold")))
                for client in (a, b)
            ]
            with anyio.fail_after(60):
                while sum((await figures(gateway, "journeywork_replica_calls")).values()) < 2:
                    await anyio.sleep(0.02)  # until the server has both
            gateway.process.terminate()
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as direct:
                await direct.post("/v1/chat/completions", json={**asking("release"), "model": "tictactoe@0"})
            assert [(await reply).status_code for reply in held] == [200, 200]
        with anyio.fail_after(60):
            assert await anyio.to_thread.run_sync(gateway.process.wait) == 0
        assert not any(child.is_running() for child in children)
        lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
        assert {line.get("worker") for line in lines if line["event"] == "ready"} == {
            1,
            2,
            None,
        }  # none: the owner


@pytest.mark.slow
async def test_workers_end_when_their_owner_is_killed(start_gateway_alone: StartGateway) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,), workers=2)
        assert gateway.process is not None
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        gateway.kill()
        _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(children, timeout=60))
        assert not alive


@pytest.mark.slow
async def test_a_worker_that_can_not_use_the_settings_ends_the_gateway(
    start_gateway_alone: StartGateway,
) -> None:
    with Mortal() as server, pytest.raises(RuntimeError, match="max_buffered_bytes"):
        start_gateway_alone(urls=(server.url,), workers=2, **{"http.max_buffered_bytes": 1})
