"""Benchmark of several judges on one log: every group is scored once through kills and stops, and few calls are lost;
writes benchmarks/results/judges.json.

    python -m benchmarks.judges [--groups 10000] [--kills 200] [--stop-s 30] [--out benchmarks/results/judges.json]

Three judge processes, a real NATS server, and the scoring server in place of a judge model: it answers after 20 ms. The
judges die at crash points drawn from a seed, and three of them are stopped (SIGSTOP) and go on later. Of every 25
groups one lacks a trajectory, times out, and gets the trajectory late. `tests/judge/matrix.py` says what is checked;
the command fails if any of it does not hold, or if a group needs more than 1.02 times the ideal number of calls, those
of killed judges left out."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from pipeline.config import NatsConfig
from tests.conftest import NatsServer
from tests.judge.matrix import JUDGES, Plan, play

_MOST_CALLS = 1.02


async def run(plan: Plan) -> dict[str, Any]:
    """Play the plan on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        began, load = time.monotonic(), os.getloadavg()[0]
        try:
            nats = NatsConfig(url=server.url, publish_deadline_s=60)
            report = await play(nats, Path(folder), plan)
        finally:
            server.stop()
    return {**report, "wall_s": time.monotonic() - began, "cpus": os.cpu_count(), "load_before": load}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges")
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stop-s", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/judges.json"))
    args = parser.parse_args()
    # Drawn low, because the next judge needs its time and not every point is passed for every group.
    each = max(1, args.groups // max(args.kills, 1) // 4)
    plan = Plan(
        groups=args.groups, kills=args.kills, groups_a_process=each, stops=JUDGES, stop_s=args.stop_s, ack_wait_s=3.0,
        timeout_s=60.0,
    )  # fmt: skip
    report = anyio.run(run, plan)
    print(json.dumps(report, indent=2))
    if report["times_ideal_calls"] > _MOST_CALLS:
        raise SystemExit("more judge calls than allowed")
    if report["kills"] < args.kills:
        raise SystemExit("not every judge died that was to die")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
