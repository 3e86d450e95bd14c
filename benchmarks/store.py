"""Benchmark of the store: `python -m benchmarks.store` (or `make bench-store`) writes benchmarks/results/store.json.

    write_events_per_s        the backlog of `--backlog` events (4 KB exchanges) through one store process, from
                              its readiness to the last acknowledgement
    backlog_peak_rss_mb       peak resident memory of that process; `early_peak_rss_mb` is the peak until a fifth of
                              the backlog was acknowledged
    lineage_s                 the view `lineage` for one checkpoint over `--trajectories` trajectories
    start_s                   from opening the lake to the end of its checks, with a table of `--files` files
    start_first_commit_s      the first commit after that

`--small` takes a tenth or less of everything, as a quick test.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from deltalake import DeltaTable

from benchmarks.bench import RESULTS, machine, nats_server, peak_mb, write_results
from benchmarks.history import make_history
from pipeline.config import Config, NatsConfig, StoreConfig
from pipeline.events import ExchangeRecorded, encode, pack_ids, pack_logprobs
from pipeline.log.broker import Broker
from store.lake import columns
from store.lake.commits import add_action
from store.lake.lake import lake_in
from store.reading import sql
from tests.kits.services import service

TAG = "rollout.exchange"


def exchange(i: int, rng: np.random.Generator) -> ExchangeRecorded:
    """About 4 KB: 550 prompt tokens, 130 sampled ones, a short chat."""
    text = " ".join(f"word{n}" for n in rng.integers(0, 5000, 80))
    return ExchangeRecorded(
        project="bench",
        trajectory=f"t{i // 8}",
        seq=i % 8,
        model="m",
        policy_version="m@3",
        step=3,
        group=f"g{i // 64}",
        request=json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode(),
        response=b'{"choices":[{"message":{"role":"assistant","content":"done"}}]}',
        prompt_ids=pack_ids(rng.integers(0, 150_000, 550)),
        sampled_ids=pack_ids(rng.integers(0, 150_000, 65)),
        logprobs=pack_logprobs(-rng.random(65)),
        finish_reason="stop",
        replica="r0",
        started_at=1,
    )


async def fill_log(broker: Broker, events: int, names: str) -> int:
    """Publish `events` exchanges with the headers the gateway sends, trajectories called `names`…; returns bytes of
    one payload."""
    rng = np.random.default_rng(0)
    payloads = [encode(exchange(i, rng)) for i in range(256)]
    waiting = []
    for i in range(events):
        name = f"{names}{i // 8}"
        headers = {"Nats-Msg-Id": f"bench/{name}/{i % 8}.0", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
        subject = f"rollout.exchange.bench.{name}"
        waiting.append(await broker.js.publish_async(subject, payloads[i % 256], headers=headers))
        if len(waiting) == 2_000:
            for future in waiting:
                await future
            waiting = []
    for future in waiting:
        await future
    return len(payloads[0])


async def write_rate(url: str, broker: Broker, run_dir: Path, events: int) -> tuple[float, float, float]:
    """Events a second through a real store process over a backlog that waits for it, and its peak memory in MB: over a
    fifth of the backlog, and over all of it. Timed from its readiness to the last acknowledgement."""
    config = Config(run_dir=str(run_dir), nats=NatsConfig(url=url), store=StoreConfig(compact_s=3600.0))
    with service("store", config) as (process, _):
        began, early = time.perf_counter(), 0.0
        while left := await _left(broker):
            await anyio.sleep(0.2)  # asking the server costs it more than this process may
            if left > events * 4 / 5:
                early = peak_mb(process)
        took, peak = time.perf_counter() - began, peak_mb(process)
    files = lake_in(run_dir / "store").table(TAG).files()
    rows = int(files.rows.sum()) if files else 0
    assert rows == events, f"{rows} of {events} rows"
    return events / took, early, peak


async def _left(broker: Broker) -> int:
    info = await broker.js.consumer_info("ROLLOUTS", "store-rollouts")
    return int(info.num_pending or 0) + int(info.num_ack_pending or 0)


def lineage(run_dir: Path, version: str) -> tuple[float, int]:
    """Seconds from connecting to the last row of one checkpoint's lineage (the median of five), and its rows."""
    times, rows = [], 0
    for _ in range(5):
        began = time.perf_counter()
        with sql.connect(run_dir) as connection:
            rows = len(connection.sql("FROM lineage WHERE version = ?", params=[version]).fetchall())
        times.append(time.perf_counter() - began)
    return sorted(times)[2], rows


def start(run_dir: Path, files: int) -> dict[str, float]:
    """Seconds to open a lake whose exchanges are `files` (empty) files, and to commit once."""
    lake = lake_in(run_dir / "store")
    per_commit, at = 50_000, 1_700_000_000_000_000
    Path(lake.storage.uri(TAG)).mkdir(parents=True)
    for first in range(0, files, per_commit):
        actions = []
        for i in range(first, min(first + per_commit, files)):
            name = f"ROLLOUTS-{i * 100 + 1:012d}-{i * 100 + 100:012d}-{i:012x}.parquet"
            Path(lake.storage.key(TAG, name)).touch()
            actions.append(add_action(name, 0, 100, (i * 100 + 1, i * 100 + 100), (at + i, at + i + 99)))
        lake.table(TAG).commit(actions, first * 100)
    DeltaTable(lake.storage.uri(TAG)).create_checkpoint()
    rows = columns.table(TAG, [exchange(0, np.random.default_rng(0))], [files * 100 + 1], [at * 2], [""])
    fresh = lake_in(run_dir / "store")
    began = time.perf_counter()
    fresh.prepare()
    opened = time.perf_counter()
    fresh.append(TAG, rows)
    took = time.perf_counter() - opened
    return {"start_files": files, "start_s": opened - began, "start_first_commit_s": took}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    result = {"command": "python -m benchmarks.store" + (" --small" if args.small else ""), **machine()}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_dir = root / "write"
        with nats_server(root / "nats") as server:
            async with Broker.connect(NatsConfig(url=server.url)) as broker:
                result["event_bytes"] = await fill_log(broker, args.backlog, "w")
                result["backlog_events"] = args.backlog
                rate, early, peak = await write_rate(server.url, broker, run_dir, args.backlog)
                result["write_events_per_s"] = rate
                result["early_peak_rss_mb"], result["backlog_peak_rss_mb"] = early, peak
        make_history(root / "history", args.trajectories)
        version = f"m@{max(1, args.trajectories // 64 // 2)}"
        result["lineage_s"], result["lineage_rows"] = lineage(root / "history", version)
        result["lineage_trajectories"] = args.trajectories
        result.update(start(root / "start", args.files))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backlog", type=int, default=1_000_000)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "store.json")
    args = parser.parse_args()
    if args.small:
        for name in ("backlog", "trajectories", "files"):
            setattr(args, name, getattr(args, name) // 10)
    result = anyio.run(measure, args)
    write_results(args.out, result)


if __name__ == "__main__":
    main()
