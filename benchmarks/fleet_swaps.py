"""Swaps adapters over two gateways and three inference servers that share no disk, while one server is added and
another one is removed. Measures whether calls fail and whether every exchange names the policy version that sampled it.

    python -m benchmarks.fleet_swaps double --streams 16    200 swaps before `tests.kits.inference_double`
    python -m benchmarks.fleet_swaps vllm --swaps 60 --streams 12

Everything runs on this machine: NATS, two gateway processes, three sampler agent processes, each with a folder of its
own, and three servers. Clients stream one completion after the other, each through one of the gateways. Two servers
are registered at first. After a third of the swaps the third joins, after two thirds the first leaves: its agent is
stopped, and then the server. Versions are verified by the `model` that the server put into each reply, and by what the
reply was made with: the double names the adapter's folder, which holds its SHA-256; for vLLM the recorded logprobs are
computed again from the version's weights. Results go to benchmarks/results/fleet_swaps-<servers>.json."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.gateway_swaps import Streams, check_labels
from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig, with_values
from pipeline.events import ExchangeRecorded, PolicyLoaded
from pipeline.log.broker import Broker
from pipeline.names import subject_token
from tests.conftest import InferenceDouble, NatsServer, VllmServer, free_port
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, make_adapter, publish_adapter

RESULTS = Path(__file__).parent / "results"
GATEWAYS, SERVERS = 2, 3
_PATIENCE_S = 90.0


class SamplerProcess(GatewayProcess):
    """`python -m rollout_gateway.sampler` beside one server."""

    module = "rollout_gateway.sampler"

    @property
    def url(self) -> str:
        return self.config.vllm.urls[0]


@dataclass
class Fleet:
    """The running processes."""

    gateways: list[GatewayProcess]
    servers: list[VllmServer]
    agents: list[SamplerProcess]
    nats: NatsConfig


@contextlib.contextmanager
def fleet(folder: Path, kind: type[VllmServer]) -> Iterator[Fleet]:
    """Start all processes except the last agent."""
    with contextlib.ExitStack() as stack:
        nats = NatsServer(folder)
        nats.start()
        stack.callback(nats.stop)
        servers = []
        for number in range(SERVERS):
            (folder / f"server-{number}").mkdir()
            servers.append(kind(folder / f"server-{number}"))
            stack.callback(servers[-1].stop)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(420), servers))
        base = Config(
            project=PROJECT,
            run_dir=str(folder),
            nats=NatsConfig(url=nats.url),
            vllm=VllmConfig(urls=tuple(s.url for s in servers), max_loras=3),
            models=(ModelConfig(name="tictactoe", base=str(VllmServer.base)),),
            gateway=GatewayConfig(key_secret_env="JOURNEYWORK_KEY_SECRET"),
        )
        os.environ["JOURNEYWORK_KEY_SECRET"] = "the same at every gateway"
        gateways = [
            GatewayProcess(
                with_values(base, {"run_dir": str(folder / f"gateway-{n}"), "gateway.port": free_port()})
            )
            for n in range(GATEWAYS)
        ]
        agents = [
            SamplerProcess(
                with_values(base, {"run_dir": str(folder / f"agent-{n}"), "vllm.urls": (server.url,)})
            )
            for n, server in enumerate(servers)
        ]
        for process in (*gateways, *agents[:-1]):
            process.start()
        for process in (*gateways, *agents):
            stack.callback(process.stop)
        yield Fleet(gateways, servers, agents, base.nats)


async def _until(condition: Any, seen: Streams, what: str) -> None:
    """Wait until `condition`, a coroutine function, returns true.

    Raises `RuntimeError` that says `what`, if a call fails meanwhile or after 90 seconds."""
    deadline = time.perf_counter() + _PATIENCE_S
    while not await condition():
        if seen.failures or time.perf_counter() > deadline:
            raise RuntimeError(f"{what}: {seen.failures[:3]}")
        await asyncio.sleep(0.02)


async def measure(
    running: Fleet, broker: Broker, *, swaps: int, streams: int
) -> tuple[dict[str, Any], Streams]:
    """Publish `swaps` versions one after the other while `streams` clients stream completions. After a third of the
    swaps a server joins, after two thirds one leaves.

    Returns the figures, and the recorded replies. The trajectories `swap-0` to `swap-<streams - 1>` stay open. Raises
    `RuntimeError` if a call fails or a version is not served."""
    seen, serving_s = Streams(), []
    async with contextlib.AsyncExitStack() as stack:
        controls = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=g.url, timeout=60))
            for g in running.gateways
        ]

        async def all_gateways_serve(version: str) -> bool:
            policies = [(await control.get("/v1/policies")).json()["data"][0] for control in controls]
            return all(policy["version"] == version for policy in policies)

        async def all_gateways_see(count: int) -> bool:
            found = [(await control.get("/health")).json()["replicas"] for control in controls]
            return all([r["ready"] for r in replicas] == [True] * count for replicas in found)

        async def publish(step: int) -> str:
            started = time.perf_counter()
            version = await publish_adapter(broker, step)
            await _until(lambda: all_gateways_serve(version), seen, f"{version} is not served")
            serving_s.append(time.perf_counter() - started)
            return version

        async def swap(step: int) -> None:
            version = await publish(step)

            async def is_answering() -> bool:
                return version in seen.begun

            await _until(is_answering, seen, f"no call was answered by {version}")

        await _until(lambda: all_gateways_see(SERVERS - 1), seen, "the servers did not join")
        await publish(1)
        for number in range(streams):
            body = {"model": "tictactoe", "id": f"swap-{number}"}
            (await controls[number % GATEWAYS].post("/v1/trajectories", json=body)).raise_for_status()
        urls = [g.url for g in running.gateways]
        clients = [
            asyncio.ensure_future(seen.client(urls[n % GATEWAYS], f"swap-{n}", n)) for n in range(streams)
        ]
        try:
            for step in range(2, swaps + 2):
                await swap(step)
                if step == 2 + swaps // 3:
                    await asyncio.to_thread(running.agents[-1].start)
                    await _until(lambda: all_gateways_see(SERVERS), seen, "the added server did not join")
                if step == 2 + 2 * swaps // 3:
                    await _remove(running, seen, streams, lambda: all_gateways_see(SERVERS - 1))
        finally:
            seen.stopping = True
            await asyncio.gather(*clients)
    out = {
        "swaps": swaps, "gateways": GATEWAYS, "servers": SERVERS, "streams": streams, "requests": len(seen.replies),
        "failures": len(seen.failures), "publish_to_serving_at_all_gateways_p50_s": float(np.median(serving_s)),
        "publish_to_serving_at_all_gateways_max_s": max(serving_s),
    }  # fmt: skip
    return out, seen


async def _remove(running: Fleet, seen: Streams, streams: int, gone: Any) -> None:
    """Stop the first agent, and then its server when all calls on it have ended. `gone`: whether all gateways have
    removed the server."""
    await asyncio.to_thread(running.agents[0].stop)
    await _until(gone, seen, "the removed server did not leave")
    enough = len(seen.replies) + 2 * streams  # every client has ended the reply that it was reading

    async def ended() -> bool:
        return len(seen.replies) >= enough

    await _until(ended, seen, "the streams do not continue")
    await asyncio.to_thread(running.servers[0].stop)


async def check_fleet(running: Fleet, broker: Broker, seen: Streams, streams: int) -> dict[str, Any]:
    """Count the calls of each server, and check that disks were disjoint and each version came from its adapter."""
    calls: Counter[str] = Counter()
    for number in range(streams):
        for r in await broker.read(ExchangeRecorded, project=PROJECT, trajectory=f"swap-{number}"):
            calls[r.event.replica] += 1
    loads = Counter(r.event.replica for r in await broker.read(PolicyLoaded))
    wrong = []
    for version, folders in seen.adapters.items():
        digest = hashlib.sha256(make_adapter(int(version.rpartition("@")[2]))).hexdigest()
        if folders != {f"{subject_token(version)}-{digest[:16]}"}:
            wrong.append(version)
    shared = [g.url for g in running.gateways if g.config.path("adapters").exists()]
    return {
        "calls_by_server": sorted(calls.values()), "loads_by_server": sorted(loads.values()),
        "versions_from_another_adapter": wrong, "gateways_with_adapters_on_disk": shared,
    }  # fmt: skip


async def run(folder: Path, kind: type[VllmServer], swaps: int, streams: int) -> dict[str, Any]:
    with fleet(folder, kind) as running:
        async with Broker.connect(running.nats) as broker:
            try:
                out, seen = await measure(running, broker, swaps=swaps, streams=streams)
            except BaseException:
                _explain([*running.gateways, *running.agents])
                raise
            out |= await check_labels(broker, seen, streams, weights=kind is VllmServer)
            return out | await check_fleet(running, broker, seen, streams)


def _explain(processes: Sequence[GatewayProcess]) -> None:
    """Print the ends of the logs, because their folders are deleted afterwards."""
    for process in processes:
        if (process.folder / "gateway.log").exists():
            print(process.folder.name, process.log[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_swaps", description=__doc__)
    parser.add_argument("servers", choices=("double", "vllm"))
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    servers = args.servers
    kind = VllmServer if servers == "vllm" else InferenceDouble
    with tempfile.TemporaryDirectory() as folder:
        out = asyncio.run(run(Path(folder), kind, args.swaps, args.streams))
    out = {"cpus": os.cpu_count(), "python": platform.python_version(), "server": servers, **out}
    (RESULTS / f"fleet_swaps-{servers}.json").write_text(json.dumps(out, indent=2) + "\n")
    print(json.dumps(out, indent=2))
    if out["failures"] or out["mislabelled"] or out["versions_from_another_adapter"]:
        raise SystemExit("calls failed or were mislabelled")


if __name__ == "__main__":
    main()
