"""`journeywork up` with `gateway.workers = 2`: calls while a worker is killed, and while one hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import psutil
import pytest

from tests.kits.installation import ROOT, SMALL, Up, up
from tests.rollout_gateway.kit import asking

pytestmark = pytest.mark.anyio

DEADLINE_S = 10


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Up]:
    settings = (
        *SMALL,
        "models.0.name=tictactoe",
        f"models.0.base={ROOT / 'examples' / 'tictactoe' / 'model'}",
        "gateway.workers=2",
        f"supervisor.deadline_s={DEADLINE_S}",
    )
    run_dir = tmp_path / "run"
    flags = ("--run-dir", str(run_dir), "--services", "gateway,sampler")
    with up(tmp_path, run_dir, *flags, settings=settings) as found:
        yield found


def client_of(url: str, timeout_s: float = 100) -> httpx.AsyncClient:
    """A client that keeps one connection."""
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout_s, trust_env=False)


@asynccontextmanager
async def connections_to(url: str) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Four clients that have made a call each. The workers share the connections."""
    async with client_of(url) as a, client_of(url) as b, client_of(url) as c, client_of(url) as d:
        clients = [a, b, c, d]
        await asyncio.gather(*map(call, clients))
        yield clients


async def count_broken(calls: Iterable[Awaitable[None]]) -> int:
    """The number of calls whose connection broke. All others were answered."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    others = [end for end in ends if end is not None and not isinstance(end, httpx.TransportError)]
    assert not others
    return sum(end is not None for end in ends)


async def call(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/chat/completions", json={**asking("play"), "max_tokens": 2})
    assert reply.status_code == 200, reply.text


async def until_workers_are(url: str, *states: str) -> None:
    """Wait until `/health` shows the workers in these states. Each question has a connection of its own, because any
    worker may be asked, also one that is killed or hangs."""
    wanted = {str(number): state for number, state in enumerate(states, 1)}
    while True:
        with contextlib.suppress(httpx.TransportError):
            async with client_of(url, timeout_s=1) as client:
                if (await client.get("/health")).json()["workers"] == wanted:
                    return
        await anyio.sleep(0.05)


def pids(installation: Up) -> dict[int, int]:
    """Process ids of the workers by number."""
    log = (installation.run_dir / "logs" / "gateway.log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {line["number"]: line["pid"] for line in lines if line["event"] == "worker ready"}


@pytest.mark.slow
async def test_calls_go_on_while_a_worker_is_killed_and_while_one_hangs(installation: Up) -> None:
    url = installation.url
    before = json.loads((installation.run_dir / "state.json").read_text())
    with anyio.fail_after(200):
        await until_workers_are(url, "ready", "ready")
        async with connections_to(url) as clients:
            killed = pids(installation)[1]
            os.kill(killed, signal.SIGKILL)
            assert await count_broken(call(client) for client in clients) < len(clients)
            assert await count_broken(call(client) for client in clients) == 0  # some on new connections
        await until_workers_are(url, "ready", "ready")
        assert pids(installation)[1] != killed

        hanging = psutil.Process(pids(installation)[2])
        async with connections_to(url) as clients:
            hanging.suspend()
            held = [asyncio.ensure_future(call(client)) for client in clients]
            await until_workers_are(url, "ready", "silent")
            for _ in range(6):  # none goes to the hanging worker, whose connections break when it is killed
                async with client_of(url) as late:
                    await call(late)
            assert 0 < await count_broken(held) < len(clients)
        await until_workers_are(url, "ready", "ready")
        assert pids(installation)[2] != hanging.pid
        assert not hanging.is_running()
    after = json.loads((installation.run_dir / "state.json").read_text())
    assert after["services"]["gateway"] == before["services"]["gateway"]  # only workers were started again
