"""Whether shadow calls delay agents: the latency of their calls with and without, in pairs.

Two agents call one gateway at the same time: one an outside model, one the apprentice itself, at the inference server
that answers the shadow calls. Blocks in which every call of the outside model is shadowed alternate with blocks in
which none is; a pair is two neighbouring blocks, and its difference that of their medians. Provider and inference
server take 20 ms for an answer.

    python -m benchmarks.shadow --pairs 20

Results go to benchmarks/results/shadow.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx

from benchmarks.bench import RESULTS, machine, write_results
from journeywork.statistics import Sample
from pipeline.config import ModelConfig, NatsConfig, OutsideConfig
from tests.conftest import NatsServer
from tests.kits.scoring_server import ScoringServer
from tests.kits.services import serving
from tests.rollout_gateway.conftest import GatewayProcess, gateways
from tests.rollout_gateway.fake_vllm import FakeVllm

CALLS = 50
"""Calls of each agent in a block."""
DELAY_S = 0.02
"""Time that provider and inference server take for an answer."""
ARMS = ("plain", "shadowed")
"""Names of the outside model without and with shadow calls."""


class SlowVllm(FakeVllm):
    """An inference server that takes its time for chat completions."""

    async def before(self, path: str, body: Any) -> None:
        if path.startswith("/v1/chat"):
            await anyio.sleep(DELAY_S)


async def measure_block(gateway: GatewayProcess, client: httpx.AsyncClient, outside: str) -> dict[str, float]:
    """Let both agents make their calls at the same time. Return the median latency in ms by agent. `outside`: name of
    the outside model that the agent `outside` calls."""
    medians: dict[str, float] = {}

    async def agent(name: str, model: str) -> None:
        """Make the calls of one run to `model`, one after the other, and put their median latency into `medians`."""
        run = await anyio.to_thread.run_sync(lambda: gateway.open(model=model))
        headers, took = {"authorization": f"Bearer {run['api_key']}"}, list[float]()
        for number in range(CALLS):
            body = {"model": model, "messages": [{"role": "user", "content": f"go {number}"}]}
            began = time.perf_counter()
            (await client.post(run["base_url"] + "/chat/completions", json=body, headers=headers)).raise_for_status()
            took.append(1000 * (time.perf_counter() - began))
        medians[name] = statistics.median(took)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent, "outside", outside)
        tasks.start_soon(agent, "policy", "tictactoe")
    return medians


async def measure(folder: Path, nats: str, pairs: int) -> dict[str, Any]:
    """Return the latencies of both agents with and without shadow calls, and their difference over so many pairs of
    blocks. `nats`: URL of the log."""
    server = SlowVllm()
    await server.start()
    out: dict[str, Any] = {"pairs": pairs, "calls": CALLS, "delay_ms": 1000 * DELAY_S}
    async with ScoringServer(lambda request: "hi", DELAY_S).run() as provider, httpx.AsyncClient(timeout=60) as client:
        tables = tuple(
            OutsideConfig(name=arm, url=provider.url, apprentice="tictactoe", shadow_percent=100.0 * (arm == ARMS[1]))
            for arm in ARMS
        )
        with gateways(folder, NatsConfig(url=nats), (ModelConfig(name="tictactoe"),)) as start:
            gateway = await anyio.to_thread.run_sync(lambda: start(urls=(server.url,), outside=tables))
            blocks: list[dict[str, dict[str, float]]] = []
            for number in range(pairs + 1):  # the first warms up
                order = ARMS if number % 2 else ARMS[::-1]
                blocks.append({arm: await measure_block(gateway, client, arm) for arm in order})
            metrics = (await client.get(f"{gateway.url}/metrics")).text.splitlines()
            out["shadows"] = [line for line in metrics if line.startswith("journeywork_shadows_total")]
            await anyio.to_thread.run_sync(gateway.stop)
    await server.stop()
    for agent in ("outside", "policy"):
        differences = [pair["shadowed"][agent] - pair["plain"][agent] for pair in blocks[1:]]
        out[agent] = {arm: statistics.median(pair[arm][agent] for pair in blocks[1:]) for arm in ARMS}
        out[agent] |= {"difference_ms": statistics.fmean(differences), "interval_ms": Sample.of(differences).interval()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure whether shadow calls delay agents.")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--out", type=Path, default=RESULTS / "shadow.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(NatsServer(Path(folder, "nats"))) as nats:
        figures = anyio.run(measure, Path(folder), nats.url, args.pairs)
    write_results(args.out, machine() | figures)


if __name__ == "__main__":
    main()
