"""Benchmark of the store: `python -m benchmarks.store` (or `make bench-store`) writes benchmarks/results/store.json.

write_events_per_s        the backlog of `--backlog` events (4 KB exchanges) through one store process, from
                          its readiness to the last acknowledgement
backlog_peak_rss_mb       peak resident memory of that process; `early_peak_rss_mb` is the peak until a fifth of
                          the backlog was acknowledged
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from benchmarks.bench import RESULTS, machine, peak_mb, write_results
from pipeline.config import Config, NatsConfig, StoreConfig
from pipeline.events import ExchangeRecorded, encode, pack_logprobs
from pipeline.log.broker import Broker
from store.lake.lake import lake_in
from tests.conftest import NatsServer
from tests.kits import events
from tests.kits.services import service, serving

TAG = "rollout.exchange"


def exchange(i: int, rng: np.random.Generator) -> ExchangeRecorded:
    """Return an exchange of about 4 KB: 550 prompt tokens, 65 sampled ones, a short chat."""
    text = " ".join(f"word{n}" for n in rng.integers(0, 5000, 80))
    return events.exchange(
        f"t{i // 8}",
        i % 8,
        rng.integers(0, 150_000, 550).tolist(),
        rng.integers(0, 150_000, 65).tolist(),
        project="bench",
        policy_version="m@3",
        step=3,
        group=f"g{i // 64}",
        request=json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode(),
        response=b'{"choices":[{"message":{"role":"assistant","content":"done"}}]}',
        logprobs=pack_logprobs(-rng.random(65)),
        finish_reason="stop",
        replica="r0",
        started_at=1,
    )


async def fill_log(broker: Broker, count: int) -> int:
    """Publish so many exchanges with the headers that the gateway sends. Return the bytes of one payload."""
    rng = np.random.default_rng(0)
    payloads = [encode(exchange(i, rng)) for i in range(256)]
    waiting = []
    for i in range(count):
        name = f"w{i // 8}"
        headers = {"Nats-Msg-Id": f"bench/{name}/{i % 8}.0", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
        subject = f"rollout.exchange.bench.{name}"
        waiting.append(await broker.js.publish_async(subject, payloads[i % 256], headers=headers))
        if len(waiting) == 2_000 or i == count - 1:
            await asyncio.gather(*waiting)
            waiting = []
    return len(payloads[0])


async def write_rate(url: str, broker: Broker, run_dir: Path, backlog: int) -> tuple[float, float, float]:
    """Let a store process write a backlog that waits on the log. Return events per second, from its readiness to the
    last acknowledgement, and its peak memory in MB over a fifth of the backlog and over all of it."""
    config = Config(run_dir=str(run_dir), nats=NatsConfig(url=url), store=StoreConfig(compact_s=3600.0))
    with service("store", config) as (process, _):
        began, early = time.perf_counter(), 0.0
        while left := await broker.lag("store-rollouts"):
            await anyio.sleep(0.2)  # asking the server costs it more than this process may
            if left > backlog * 4 / 5:
                early = peak_mb(process)
        took, peak = time.perf_counter() - began, peak_mb(process)
    files = lake_in(run_dir / "store").table(TAG).files()
    rows = int(files.rows.sum()) if files else 0
    assert rows == backlog, f"{rows} of {backlog} rows"
    return backlog / took, early, peak


async def measure(backlog: int) -> dict[str, Any]:
    """Return the figures of a store that writes a backlog of so many events."""
    with tempfile.TemporaryDirectory() as folder, serving(NatsServer(Path(folder, "nats"))) as server:
        async with Broker.connect(NatsConfig(url=server.url)) as broker:
            size = await fill_log(broker, backlog)
            rate, early, peak = await write_rate(server.url, broker, Path(folder, "write"), backlog)
    return {
        "event_bytes": size,
        "backlog_events": backlog,
        "write_events_per_s": rate,
        "early_peak_rss_mb": early,
        "backlog_peak_rss_mb": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "store.json")
    args = parser.parse_args()
    write_results(args.out, machine() | anyio.run(measure, args.backlog))


if __name__ == "__main__":
    main()
