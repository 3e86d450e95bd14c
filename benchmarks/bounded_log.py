"""Benchmark of the log's memory: `python -m benchmarks.bounded_log` writes benchmarks/results/bounded_log.json.

Trajectories (opened, one small exchange, completed: three subjects each) go through a NATS server whose ROLLOUTS
deletes events after `--max-age` seconds, `--rate` a second. The server holds every subject that has a message in
memory, so its heap has to stop growing once the first events are deleted.

    live_heap_mb       the server's heap after a garbage collection, every 20 s once events are deleted
    live_heap_growth   mean of the second half of these over that of the first; 1 is flat
    rss_mb             resident memory of the server: most
    subjects           subjects in the stream: most
    trajectories, rate what was published, and how fast

A million takes about `1e6 / rate` seconds. The heap depends on `rate * max_age`, not on the number of trajectories.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from benchmarks.bench import RESULTS, machine, nats_server, write_results
from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened, pack_ids, pack_logprobs
from pipeline.log.broker import Broker
from pipeline.names import new_dated_id
from tests.conftest import free_port

_AT_ONCE = 64
_EVERY_S = 20.0
_EXPECTED = {"Nats-Expected-Last-Subject-Sequence": "0"}
_IDS, _LOGPROBS = pack_ids(range(40)), pack_logprobs([-0.5] * 40)


@dataclass
class Sample:
    """The server at one time."""

    at_s: float
    live: int
    """Bytes of the heap after a garbage collection."""
    rss: int
    subjects: int
    messages: int


class Load:
    """Publishes trajectories at a rate."""

    def __init__(self, broker: Broker, count: int, rate: float) -> None:
        self._broker, self.count, self._rate = broker, count, rate
        self.started = self.done = 0
        self._began = time.monotonic()
        self.rate = 0.0
        """Trajectories a second, once all are published."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tg:
            for _ in range(_AT_ONCE):
                tg.start_soon(self._publish_due)
        self.rate = self.count / (time.monotonic() - self._began)

    async def _publish_due(self) -> None:
        while self.started < self.count:
            due = self._began + self.started / self._rate
            self.started += 1
            if (wait_s := due - time.monotonic()) > 0:
                await anyio.sleep(wait_s)
            await self._publish_trajectory(new_dated_id("t"))
            self.done += 1

    async def _publish_trajectory(self, name: str) -> None:
        broker = self._broker
        await broker.publish(TrajectoryOpened(project="bench", trajectory=name, model="m", group=name))
        exchange = ExchangeRecorded(
            project="bench",
            trajectory=name,
            seq=0,
            model="m",
            policy_version="m@0",
            step=0,
            request=b"{}",
            response=b"{}",
            prompt_ids=_IDS,
            sampled_ids=_IDS,
            logprobs=_LOGPROBS,
        )
        await broker.publish(exchange, _EXPECTED)
        await broker.publish(
            TrajectoryCompleted(project="bench", trajectory=name, model="m", group=name, reward=1.0, exchanges=1)
        )


async def watch(process: psutil.Process, port: int, profiling: int, load: Load) -> list[Sample]:
    """Sample the server until the load has ended."""
    samples: list[Sample] = []
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        while load.done < load.count:
            await anyio.sleep(_EVERY_S)
            jsz = (await client.get(f"http://127.0.0.1:{port}/jsz?accounts=1&streams=1")).json()
            streams = jsz["account_details"][0]["stream_detail"]
            state = next(d["state"] for d in streams if d["name"] == "ROLLOUTS")
            heap = (await client.get(f"http://127.0.0.1:{profiling}/debug/pprof/heap?gc=1&debug=1")).text
            live = int(heap.partition("# HeapAlloc = ")[2].split()[0])
            at_s, rss = time.monotonic() - began, process.memory_info().rss
            samples.append(Sample(at_s, live, rss, state.get("num_subjects", 0), state["messages"]))
    return samples


def summary(samples: list[Sample], max_age_s: float) -> dict[str, Any]:
    """Return figures of the time in which events are deleted. Raises `SystemExit` where that was too short."""
    steady = [s for s in samples if s.at_s > max_age_s]
    if len(steady) < 2:
        raise SystemExit(f"The load was over {_EVERY_S * 2:g} s or less after --max-age: give more --trajectories.")
    lives = [s.live / 1e6 for s in steady]
    half = len(lives) // 2
    return {
        "steady_s": steady[-1].at_s - max_age_s,
        "live_heap_mb": {"least": min(lives), "median": statistics.median(lives), "most": max(lives)},
        "live_heap_growth": statistics.mean(lives[-half:]) / statistics.mean(lives[:half]),
        "rss_mb": max(s.rss for s in samples) / 1e6,
        "subjects": max(s.subjects for s in samples),
        "messages": max(s.messages for s in samples),
        "live_heap_mb_every_20_s": [round(s.live / 1e6, 1) for s in samples],
    }


async def measure(folder: Path, count: int, rate: float, max_age_s: float) -> dict[str, Any]:
    port, profiling = free_port(), free_port()
    with nats_server(folder / "nats", f"http: 127.0.0.1:{port}\nprof_port: {profiling}\n") as server:
        assert server.process is not None
        config = NatsConfig(url=server.url, rollouts_max_age_h=max_age_s / 3600)
        async with Broker.connect(config) as broker, anyio.create_task_group() as tg:
            load = Load(broker, count, rate)
            tg.start_soon(load.run)
            samples = await watch(psutil.Process(server.process.pid), port, profiling, load)
            return {"rate": load.rate, **summary(samples, max_age_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=1_000.0, help="trajectories a second, at most")
    parser.add_argument("--max-age", type=float, default=60.0, help="seconds that the log keeps events")
    parser.add_argument("--out", type=Path, default=RESULTS / "bounded_log.json")
    args = parser.parse_args()
    out = {**machine(), "trajectories": args.trajectories, "max_age_s": args.max_age}
    with tempfile.TemporaryDirectory(prefix="bench-bounded-") as folder:
        out |= anyio.run(measure, Path(folder), args.trajectories, args.rate, args.max_age)
    write_results(args.out, out)


if __name__ == "__main__":
    main()
