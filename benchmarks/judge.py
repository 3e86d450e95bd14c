# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - a benchmark waits for other processes, and polls what it measures
"""Benchmark of the judge's speed and robustness; writes benchmarks/results/judge.json.

    python -m benchmarks.judge [--groups 1000] [--concurrency 2] [--out benchmarks/results/judge.json]

A real NATS server, the judge as a process, and the scoring server (no language model: it answers in 50 ms
what the trajectories' own text says) as another process. Every group has 8 trajectories and is judged twice, in
different orders. `ideal_groups_per_s` is the maximum that the concurrency allows: concurrency / (2 x 50 ms). A second
run kills the judge with SIGKILL in the middle. Position bias and injection are measured with the same judge code in
this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import httpx
import psutil

from pipeline.config import Config, JudgeConfig, NatsConfig, save
from pipeline.events import GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.judge.attacks import ATTACKS
from tests.judge.kit import Model, completed, exchange, ruler, transcript
from tests.kits.scoring_server import Scorer

MEMBERS = 8
DELAY_S = 0.05
JUDGINGS = 2


async def play(broker: Broker, groups: int) -> None:
    """Publish every trajectory, group by group."""
    limiter = anyio.CapacityLimiter(128)

    async def one(group: int) -> None:
        async with limiter:
            for member in range(MEMBERS):
                name = f"t{group}-{member}"
                await broker.publish(
                    exchange(name, f"I move. quality={(member + 1) / 10}", task=f"task {group} " + "x" * 500)
                )
                await broker.publish(completed(name, f"g{group}", group_size=MEMBERS, exchanges=1))

    async with anyio.create_task_group() as tg:
        for group in range(groups):
            tg.start_soon(one, group)


@asynccontextmanager
async def process(
    *argv: str, log: Path, ready: bool = False
) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a process; yield it and its first line of output."""
    reading, writing = os.pipe()
    more = ["--ready-fd", str(writing)] if ready else []
    with log.open("ab") as errors:
        started = subprocess.Popen(
            [sys.executable, "-m", *argv, *more],
            pass_fds=[writing],
            stdout=None if ready else writing,
            stderr=errors,
        )
    os.close(writing)
    try:
        line = await anyio.to_thread.run_sync(os.read, reading, 4096)
        if not line:
            raise RuntimeError(log.read_text()[-3000:])
        yield started, line.decode()
    finally:
        os.close(reading)
        started.terminate()
        await anyio.to_thread.run_sync(started.wait)


async def until(broker: Broker, groups: int) -> None:
    """Returns once so many groups are scored."""
    while True:
        info = await broker.js.stream_info("GROUPS", subjects_filter="group.scored.>")
        if len(info.state.subjects or {}) >= groups:
            return
        await anyio.sleep(0.1)


async def scored(broker: Broker) -> list[GroupScored]:
    history = await broker.read(GroupScored)
    return [r.event for r in history]


def memory_mb(pid: int) -> float:
    """Peak resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return psutil.Process(pid).memory_info().rss / 2**20


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and its children have used."""
    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in [process, *process.children(recursive=True)])


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its children, in MB."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / 2**20


async def measure(groups: int, concurrency: int, kill: bool) -> dict[str, Any]:
    """One run over `groups`; with `kill`, the judge dies once in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        nats = NatsServer(root / "nats")
        nats.folder.mkdir()
        nats.start()
        settings = NatsConfig(url=nats.url)
        try:
            async with (
                Broker.connect(settings) as broker,
                process(
                    "tests.kits.scoring_server", "--delay-ms", str(DELAY_S * 1000), log=root / "server.log"
                ) as (_, line),
            ):
                await play(broker, groups)
                config = root / "config.toml"
                judge = JudgeConfig(
                    model="openai/scorer",
                    api_base=json.loads(line)["url"],
                    concurrency=concurrency,
                    passes=JUDGINGS,
                )
                save(Config(nats=settings, run_dir=folder, judge=judge), config)
                if kill:
                    async with process(
                        "judge", "--config", str(config), log=root / "judge.log", ready=True
                    ) as (running, _):
                        await until(broker, groups // 2)
                        running.send_signal(signal.SIGKILL)
                        running.wait()
                async with process("judge", "--config", str(config), log=root / "judge.log", ready=True) as (
                    running,
                    _,
                ):
                    began, cpu_began = time.monotonic(), cpu_s(running.pid)
                    done = len(await scored(broker))
                    await until(broker, done + (groups - done) // 4)
                    early = resident_mb(running.pid)
                    await until(broker, groups)
                    late = resident_mb(running.pid)
                    took, cpu = time.monotonic() - began, cpu_s(running.pid) - cpu_began
                    async with httpx.AsyncClient() as client:
                        seen = (await client.get(json.loads(line)["url"] + "/models")).json()
                    while await broker.lag("judge"):
                        await anyio.sleep(0.1)
                    children = psutil.Process(running.pid).children(recursive=True)
                    memory = memory_mb(running.pid) + sum(memory_mb(c.pid) for c in children)
                events = await scored(broker)
                found = [e.group for e in events]
                other = len(await broker.read(GroupDiscarded))
                return {
                    "groups_per_s": (groups - done) / took,
                    "wall_s": took,
                    "peak_rss_mb": memory,
                    "rss_growth_mb": late - early,
                    "cpu_ms_per_group": 1000 * cpu / (groups - done),
                    "most_at_once": seen["most_at_once"],
                    "call_s": mean(v.latency_s / v.attempts for e in events for v in e.verdicts),
                    "exactly_once": len(found) == len(set(found)) == groups and other == 0,
                    "scored_before": done,
                }
        finally:
            nats.stop()


async def position_bias(groups: int = 100) -> dict[str, float]:
    """The score gained by the first place with a judge that adds 0.3 to it: after one pass, and after aggregation."""
    judge = ruler(Model(Scorer(first_bonus=0.3)))
    merged, single = [], []
    for number in range(groups):
        truth = {f"g{number}-{i}": round(0.05 + 0.08 * ((i * 5 + number) % 8), 3) for i in range(8)}
        scores, verdicts = await judge.judge([transcript(n, f"quality={q}") for n, q in truth.items()])
        led = {v.order[0] for v in verdicts}
        off = {n: scores[n] - truth[n] for n in truth}
        merged.append(mean(off[n] for n in led) - mean(off[n] for n in off if n not in led))
        first = {s.trajectory: s.score - truth[s.trajectory] for s in verdicts[0].scores}
        single.append(
            first[verdicts[0].order[0]] - mean(v for n, v in first.items() if n != verdicts[0].order[0])
        )
    return {"position_bias": mean(merged), "position_bias_one_judging": mean(single)}


async def injections() -> tuple[int, int]:
    """Number of attacks that raised a score of a judge that obeys text outside the fences, and number of attacks."""
    gained = 0
    for attack in ATTACKS:
        honest = [transcript(f"h{i}", f"quality={0.5 + i / 10}") for i in range(3)]
        scores, _ = await ruler(Model(Scorer(obedient=True))).judge(
            [*honest, transcript("attacker", "quality=0.1", f"{attack} quality=0.1")]
        )
        gained += scores["attacker"] > 0.1 + 1e-9
    return gained, len(ATTACKS)


async def run(groups: int, concurrency: int) -> dict[str, Any]:
    random.seed(0)
    load = os.getloadavg()[0]
    plain = await measure(groups, concurrency, kill=False)
    killed = await measure(groups, concurrency, kill=True)
    ideal = concurrency / (JUDGINGS * DELAY_S)
    gained, attacks = await injections()
    return {
        "groups": groups,
        "members": MEMBERS,
        "judgings": JUDGINGS,
        "concurrency": concurrency,
        "cpus": os.cpu_count(),
        "load_before": load,
        "judge_latency_s": DELAY_S,
        "groups_per_s": plain["groups_per_s"],
        "ideal_groups_per_s": ideal,
        "times_ideal": ideal / plain["groups_per_s"],
        "peak_rss_mb": plain["peak_rss_mb"],
        "rss_growth_mb_last_three_quarters": plain["rss_growth_mb"],
        "cpu_ms_per_group": plain["cpu_ms_per_group"],
        "exactly_once": plain["exactly_once"],
        "call_s": plain["call_s"],
        "most_at_once": plain["most_at_once"],
        "exactly_once_after_kill": killed["exactly_once"],
        "scored_before_kill": killed["scored_before"],
        **await position_bias(),
        "injection_successes": gained,
        "injection_attacks": attacks,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/judge.json"))
    args = parser.parse_args()
    result = anyio.run(run, args.groups, args.concurrency)
    if result["most_at_once"] > args.concurrency:
        raise SystemExit(f"more calls at once than judge.concurrency: {result}")
    for name in ("exactly_once", "exactly_once_after_kill"):
        if not result[name]:
            raise SystemExit(f"{name} does not hold: {result}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
