# ruff: noqa: ASYNC110 - a benchmark waits for other processes, and polls what it measures
"""Benchmark of the judge's speed; writes benchmarks/results/judge.json.

    python -m benchmarks.judge [--groups 1000] [--out benchmarks/results/judge.json]

A real NATS server, the judge as a process, and the scoring server (no language model: it answers in 50 ms
what the trajectories' own text says) as another process. Every group has 8 trajectories and is judged twice, in
different orders, by two requests at once. `ideal_groups_per_s` is the maximum that this allows: 2 / (2 x 50 ms).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import httpx

from benchmarks.bench import RESULTS, cpu_seconds, machine, peak_mb, write_results
from pipeline.config import Config, JudgeConfig, NatsConfig
from pipeline.events import GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.judge.kit import completed, exchange
from tests.kits.services import running, service, serving

MEMBERS = 8
DELAY_S = 0.05
JUDGINGS = 2
"""Requests by which a group is judged, in different orders."""
CONCURRENCY = 2
"""Requests at the same time."""


async def publish_runs(broker: Broker, groups: int) -> None:
    """Publish the trajectories of so many groups, with a call each."""
    limiter = anyio.CapacityLimiter(128)

    async def publish_group(group: int) -> None:
        """Publish the completed runs of a group, each with one call."""
        async with limiter:
            for member in range(MEMBERS):
                name = f"t{group}-{member}"
                await broker.publish(
                    exchange(name, f"I move. quality={(member + 1) / 10}", task=f"task {group} " + "x" * 500)
                )
                await broker.publish(completed(name, f"g{group}", group_size=MEMBERS, exchanges=1))

    async with anyio.create_task_group() as tg:
        for group in range(groups):
            tg.start_soon(publish_group, group)


async def until_scored(broker: Broker, groups: int) -> None:
    """Wait until so many groups are scored."""
    while True:
        info = await broker.js.stream_info("GROUPS", subjects_filter="group.scored.>")
        if len(info.state.subjects or {}) >= groups:
            return
        await anyio.sleep(0.1)


async def measure(groups: int) -> dict[str, Any]:
    """Return the figures of a judge that scores so many groups."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        settings = NatsConfig(url=stack.enter_context(serving(NatsServer(root / "nats"))).url)
        scoring = (sys.executable, "-m", "tests.kits.scoring_server", "--delay-ms", str(DELAY_S * 1000))
        _, line = stack.enter_context(running(*scoring, log=root / "server.log", stdout=True))
        url = json.loads(line)["url"]
        judge = JudgeConfig(model="openai/scorer", api_base=url, concurrency=CONCURRENCY, passes=JUDGINGS)
        config = Config(nats=settings, run_dir=folder, judge=judge)
        async with Broker.connect(settings) as broker:
            await publish_runs(broker, groups)
            with service("judge", config) as (process, _):
                began, cpu_began = time.monotonic(), cpu_seconds(process)
                await until_scored(broker, groups)
                took, cpu = time.monotonic() - began, cpu_seconds(process) - cpu_began
                async with httpx.AsyncClient() as client:
                    seen = (await client.get(url + "/models")).json()
                while await broker.lag("judge"):
                    await anyio.sleep(0.1)
                memory = peak_mb(process)
            events = [r.event for r in await broker.read(GroupScored)]
            names = {e.group for e in events}
            discarded = len(await broker.read(GroupDiscarded))
    return {
        "groups_per_s": groups / took,
        "peak_rss_mb": memory,
        "cpu_ms_per_group": 1000 * cpu / groups,
        "most_at_once": seen["most_at_once"],
        "call_s": mean(v.latency_s / v.attempts for e in events for v in e.verdicts),
        "exactly_once": len(events) == len(names) == groups and not discarded,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "judge.json")
    args = parser.parse_args()
    ideal = CONCURRENCY / (JUDGINGS * DELAY_S)
    result = {
        **machine(),
        "groups": args.groups,
        "members": MEMBERS,
        "judgings": JUDGINGS,
        "concurrency": CONCURRENCY,
        "judge_latency_s": DELAY_S,
        "ideal_groups_per_s": ideal,
        **anyio.run(measure, args.groups),
    }
    result["times_ideal"] = ideal / result["groups_per_s"]
    if result["most_at_once"] > CONCURRENCY:
        raise SystemExit(f"more calls at once than judge.concurrency: {result}")
    if not result["exactly_once"]:
        raise SystemExit(f"exactly_once does not hold: {result}")
    write_results(args.out, result)


if __name__ == "__main__":
    main()
