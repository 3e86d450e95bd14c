"""Benchmark of the dashboard: `python -m benchmarks.dashboard` writes benchmarks/results/dashboard.json.

    ready_s        from the start of the process to the first request that it takes
    pages          seconds of each page over `--trajectories` trajectories of four calls: `first` after the start, and
                   `again`, the median of five further requests, each for another thing where a page shows one thing
    peak_rss_mb    peak resident memory of the process over all of them, each page also three times at once

`--run-dir` keeps the made history in a folder, or takes one that an earlier call made there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from benchmarks.store import put_rows
from pipeline.config import Config, save
from store.lake.lake import Lake, lake_in

RESULT = Path(__file__).parent / "results" / "dashboard.json"
PER_FILE = 25_000
CALLS, MEMBERS, GROUPS_A_STEP = 4, 8, 8
PROMPT, SAMPLED = 40, 10
BASE_US = 1_700_000_000_000_000
APART_US = 800_000
"""Time between two trajectories: a million takes nine days."""


def make_history(run_dir: Path, trajectories: int) -> None:
    """A store with so many trajectories of 4 calls, in groups of 8, 8 groups a step, scored by a judge."""
    lake, rng = lake_in(run_dir / "store"), np.random.default_rng(1)
    for first in range(0, trajectories, PER_FILE):
        count = min(PER_FILE, trajectories - first)
        _rollouts(lake, first, count, rng)
        _groups(lake, first, count)
        _steps(lake, first, count)
    Path(lake.storage.root, "made").write_text(str(trajectories))


def _rollouts(lake: Lake, first: int, count: int, rng: np.random.Generator) -> None:
    numbers = np.arange(first, first + count)
    began = BASE_US + numbers * APART_US
    steps = numbers // (MEMBERS * GROUPS_A_STEP)
    names, groups = [f"t{i:07d}" for i in numbers], [f"g{i // MEMBERS:06d}" for i in numbers]
    tasks = [f"task {i // MEMBERS % 500}" for i in numbers]
    common: dict[str, Any] = {
        "project": ["p"] * count, "model": ["m"] * count, "trajectory": names, "group": groups, "task": tasks,
        "attempt": numbers % MEMBERS, "split": ["train"] * count, "traceparent": [""] * count, "v": np.ones(count, int),
    }  # fmt: skip
    opened = {**common, "log_seq": numbers * 6 + 1, "log_at": began, "at": began}
    put_rows(lake, "rollout.opened", opened, count)
    ended = began + 2_000_000
    completed = {
        **common, "log_seq": numbers * 6 + 6, "log_at": ended, "at": ended, "opened_at": began,
        "outcome": ["scored"] * count, "reward": rng.random(count).round(3), "exchanges": np.full(count, CALLS),
        "prompt_tokens": np.full(count, CALLS * PROMPT), "sampled_tokens": np.full(count, CALLS * SAMPLED),
        "first_step": steps, "last_step": steps,
    }  # fmt: skip
    put_rows(lake, "rollout.completed", completed, count)
    of = np.repeat(numbers, CALLS)
    turns, rows = np.tile(np.arange(CALLS), count), count * CALLS
    seqs = of * 6 + 2 + turns
    at = BASE_US + of * APART_US + turns * 400_000
    words = np.array([f"word{i}" for i in range(2_000)])
    asked = pa.array([
        json.dumps({"messages": [{"role": "user", "content": " ".join(rng.choice(words, 40))}]}) for _ in range(2_000)
    ])  # fmt: skip
    said = pa.array([
        json.dumps({"choices": [{"message": {"role": "assistant", "content": " ".join(rng.choice(words, 10))}}]})
        for _ in range(2_000)
    ])  # fmt: skip
    which = rng.integers(0, 2_000, rows)
    exchanges: dict[str, Any] = {
        "log_seq": seqs, "log_at": at, "at": at, "started_at": at - 300_000, "project": ["p"] * rows,
        "model": ["m"] * rows, "traceparent": [""] * rows, "v": np.ones(rows, int), "seq": turns,
        "trajectory": np.repeat(names, CALLS), "group": np.repeat(groups, CALLS), "choice": np.zeros(rows, int),
        "policy_version": [f"m@{i}" for i in np.repeat(steps, CALLS)], "step": np.repeat(steps, CALLS),
        "request": asked.take(pa.array(which)), "response": said.take(pa.array(which)), "status": ["complete"] * rows,
        "prompt_ids": _lists(rng.integers(0, 150_000, rows * PROMPT, dtype=np.int32), PROMPT),
        "sampled_ids": _lists(rng.integers(0, 150_000, rows * SAMPLED, dtype=np.int32), SAMPLED),
        "logprobs": _lists(-rng.random(rows * SAMPLED, dtype=np.float32), SAMPLED),
        "forced": pa.array([[]] * rows, pa.list_(pa.int8())), "side_call": np.zeros(rows, bool),
    }  # fmt: skip
    put_rows(lake, "rollout.exchange", exchanges, rows)


def _lists(values: Any, each: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.arange(0, len(values) + 1, each, dtype=np.int32), values)


def _groups(lake: Lake, first: int, count: int) -> None:
    groups = np.arange(first // MEMBERS, (first + count) // MEMBERS)
    rows = len(groups)
    at = BASE_US + groups * MEMBERS * APART_US + 10_000_000
    names = [[f"t{g * MEMBERS + k:07d}" for k in range(MEMBERS)] for g in groups]
    made: dict[str, Any] = {
        "log_seq": groups + 1, "log_at": at, "at": at, "project": ["p"] * rows, "model": ["m"] * rows,
        "group": [f"g{g:06d}" for g in groups], "judge": ["j"] * rows, "branch": ["main"] * rows,
        "split": ["train"] * rows, "task": [f"task {g % 500}" for g in groups],
        "members": [
            [{"trajectory": name, "reward": (k + g % 5) / 12, "outcome": "scored", "split": "train", "exchanges": CALLS,
              "first_step": g // GROUPS_A_STEP, "last_step": g // GROUPS_A_STEP} for k, name in enumerate(own)]
            for g, own in zip(groups.tolist(), names, strict=True)
        ],
        "verdicts": [
            [{"judge_model": "judge/1", "rubric": "general", "order": own, "cost_usd": 0.002, "latency_s": 1.5,
              "attempts": 1, "scores": [
                {"trajectory": name, "score": k / 8, "explanation": "It does what it was asked."}
                for k, name in enumerate(own)]}]
            for own in names
        ],
    }  # fmt: skip
    put_rows(lake, "group.scored", made, rows)


def _steps(lake: Lake, first: int, count: int) -> None:
    a_step = MEMBERS * GROUPS_A_STEP
    steps = np.arange(max(1, first // a_step), (first + count) // a_step)
    rows = len(steps)
    at = BASE_US + steps * a_step * APART_US
    made: dict[str, Any] = {
        "log_seq": steps, "log_at": at, "at": at, "started_at": at - 20_000_000, "project": ["p"] * rows,
        "model": ["m"] * rows, "step": steps, "version": [f"m@{s}" for s in steps],
        "parent": [f"m@{s - 1}" for s in steps], "branch": ["main"] * rows,
        "groups": [[f"g{(s - 1) * 8 + k:06d}" for k in range(8)] for s in steps],
        "group_seqs": [[(s - 1) * 8 + k + 1 for k in range(8)] for s in steps],
        "metrics": [[("loss", 1 / s), ("kl", s / 1e5), ("entropy", 1.0)] for s in steps.tolist()],
    }  # fmt: skip
    put_rows(lake, "policy.checkpoint", made, rows)


@contextmanager
def running(run_dir: Path) -> Iterator[tuple[httpx.Client, int, float]]:
    """A dashboard over a run: its client, its process id, and the seconds until it was ready."""
    file = run_dir / "config.toml"
    if not file.is_file():
        save(Config(run_dir=str(run_dir.absolute())), file)
    read_end, write_end = os.pipe()
    command = [
        sys.executable,
        "-m",
        "store.showing.dashboard",
        "--config",
        str(file),
        "--ready-fd",
        str(write_end),
    ]
    began = time.perf_counter()
    with subprocess.Popen(command, pass_fds=(write_end,)) as process:
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            url = json.loads(pipe.readline())["url"]
            took = time.perf_counter() - began
            try:
                with httpx.Client(base_url=url, timeout=300) as client:
                    yield client, process.pid, took
            finally:
                process.terminate()


def get(client: httpx.Client, path: str) -> float:
    """Return the seconds that a page takes. Raises an error if it shows one."""
    began = time.perf_counter()
    answer = client.get(f"/{path}").raise_for_status()
    if 'role="alert"' in answer.text:
        raise RuntimeError(f"{path}: {answer.text}")
    return time.perf_counter() - began


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process in megabytes."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def page_addresses(trajectories: int) -> dict[str, list[str]]:
    """Return the addresses to request for each page; the first one is the request with an empty cache."""
    at = [trajectories * i // 7 for i in range(1, 7)]
    steps = [max(1, i // 64) for i in at]
    return {
        "overview": ["overview"] * 6, "overview.json": ["overview.json"] * 6, "numbers": ["numbers"] * 6,
        "groups": ["groups"] * 6, "groups, last page": ["groups?page=199"] * 6,
        "groups by mean": ["groups?sort=-mean"] * 6, "groups of a task": [f"groups?task=task {i}" for i in range(6)],
        "groups of a step": [f"groups?step={s}" for s in steps],
        "group": [f"group/g{i // 8:06d}" for i in at],
        "trajectories": ["trajectories"] * 6, "trajectories, last page": ["trajectories?page=199"] * 6,
        "trajectories by reward": ["trajectories?sort=reward"] * 6,
        "open trajectories": ["trajectories?outcome=open"] * 6,
        "trajectory": [f"trajectory/t{i:07d}" for i in at],
        "checkpoints": ["checkpoints"] * 6, "checkpoint": [f"checkpoint/m@{s}" for s in steps],
        "judge": ["judge"] * 6, "compare": ["compare"] * 6, "decisions": ["decisions"] * 6,
        "event": [f"event/group.scored/{i // 8 + 1}" for i in at],
        "sql": [f"sql?query=SELECT outcome, count(*) FROM trajectories GROUP BY {g}" for g in ("ALL", "outcome") * 3],
    }  # fmt: skip


def measure(run_dir: Path, trajectories: int) -> dict[str, Any]:
    """Every page over the made history."""
    addresses = page_addresses(trajectories)
    with running(run_dir) as (client, pid, ready_s):
        timed = {}
        for page, paths in addresses.items():
            first, *again = (get(client, path) for path in paths)
            timed[page] = {"first": round(first, 3), "again": round(median(again), 3)}
        with ThreadPoolExecutor(3) as pool:
            for page, paths in addresses.items():
                if page != "sql":
                    list(pool.map(lambda path: get(client, path), paths[:3]))
        return {"ready_s": round(ready_s, 2), "pages": timed, "peak_rss_mb": peak_mb(pid)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard")
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--run-dir", type=Path, help="folder of the made history")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = args.run_dir or Path(folder)
        if not (run_dir / "store" / "made").exists():
            make_history(run_dir, args.trajectories)
        report: dict[str, Any] = {
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            "trajectories": int((run_dir / "store" / "made").read_text()),
        }
        report |= measure(run_dir, report["trajectories"])
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
