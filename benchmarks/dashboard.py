"""Benchmark of the dashboard: `python -m benchmarks.dashboard` writes benchmarks/results/dashboard.json.

ready_s        from the start of the process to the first request that it takes
pages          seconds of each page over `--trajectories` trajectories of four calls: `first` after the start, and
               `again`, the median of five further requests, each for another thing where a page shows one thing
peak_rss_mb    peak resident memory of the process over all of them, each page also three times at once
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.bench import RESULTS, machine, peak_mb, write_results
from benchmarks.history import make_history
from pipeline.config import Config, UiConfig
from tests.kits.services import service

_PAGES = (
    *("overview", "overview.json", "numbers", "checkpoints", "judge", "compare", "decisions"),
    *("groups", "groups?page=199", "groups?sort=-mean"),
    *("trajectories", "trajectories?page=199", "trajectories?sort=reward", "trajectories?outcome=open"),
)
"""Pages with one address."""


def get(client: httpx.Client, path: str) -> float:
    """Return the seconds that a page takes. Raises an error if it shows one."""
    began = time.perf_counter()
    answer = client.get(f"/{path}").raise_for_status()
    if 'role="alert"' in answer.text:
        raise RuntimeError(f"{path}: {answer.text}")
    return time.perf_counter() - began


def page_addresses(trajectories: int) -> dict[str, list[str]]:
    """Return the addresses to request for each page; the first one is the request with an empty cache."""
    at = [trajectories * i // 7 for i in range(1, 7)]
    steps = [max(1, i // 64) for i in at]
    return {page: [page] * 6 for page in _PAGES} | {
        "groups of a task": [f"groups?task=task {i}" for i in range(6)],
        "groups of a step": [f"groups?step={s}" for s in steps],
        "group": [f"group/g{i // 8:06d}" for i in at],
        "trajectory": [f"trajectory/t{i:07d}" for i in at],
        "checkpoint": [f"checkpoint/m@{s}" for s in steps],
    }


def measure(run_dir: Path, trajectories: int) -> dict[str, Any]:
    """Every page over the made history."""
    addresses = page_addresses(trajectories)
    began = time.perf_counter()
    config = Config(run_dir=str(run_dir.absolute()), ui=UiConfig(port=0))
    with service("store.showing.dashboard", config) as (process, line):
        ready_s = time.perf_counter() - began
        client = httpx.Client(base_url=json.loads(line)["url"], timeout=300)
        timed = {}
        for page, paths in addresses.items():
            first, *again = (get(client, path) for path in paths)
            timed[page] = {"first": round(first, 3), "again": round(median(again), 3)}
        with ThreadPoolExecutor(3) as pool:
            for paths in addresses.values():
                list(pool.map(lambda path: get(client, path), paths[:3]))
        return {"ready_s": round(ready_s, 2), "pages": timed, "peak_rss_mb": round(peak_mb(process), 1)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard")
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_history(Path(folder), args.trajectories)
        report = {**machine(), "trajectories": args.trajectories, **measure(Path(folder), args.trajectories)}
    write_results(RESULTS / "dashboard.json", report)


if __name__ == "__main__":
    main()
