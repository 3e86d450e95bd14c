"""Benchmark of the gateway's cost per call and per streamed chunk: `make bench-gateway`.

An instant inference server and a closed-loop client, both in C (`gateway_load.c`), on one core; the gateway on another.
Bodies are 2 KB. Figures per core are calls (or chunks) per second of the gateway's own CPU time, so a client that can't
keep it busy does not flatter or punish it; `*_rps` is throughput by wall-clock time. Calls that name no trajectory,
captured ones, and those to the bare server are run five times, in turn, and the best run of each counts. Streams come
at two rates: 50 chunks a second each, which is more than one core passes on, and 20, which it is not.

    python -m benchmarks.gateway --seconds 1 --only calls   a quick try

Results go to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench import CONNECTIONS, PATH, RESULTS, STREAMS, Bench, Target, machine, write_results

RATES = {"stream": 20.0, "stream_paced": 50.0}
"""Milliseconds between a stream's chunks."""
OPEN = 10_000
"""Trajectories open at once while memory is watched."""

Figures = dict[str, Any]


def bench_calls(bench: Bench) -> Figures:
    out: Figures = {}
    with bench.upstream(), bench.nats() as url, bench.gateway(url, CONNECTIONS) as capture:
        plain = dataclasses.replace(capture, name="plain", path=PATH)  # calls that name no trajectory
        for name, runs in bench.race([Target("direct", bench.upstream_port), plain, capture]).items():
            best = max(runs, key=lambda run: run.per_core or run.rps)
            out |= {f"{name}_rps": best.rps}
            if name != "direct":
                out |= {f"{name}_rps_per_core": best.per_core, f"{name}_p99_ms": best.load["p99_ms"]}
    return out


def bench_streams(bench: Bench) -> Figures:
    """A thousand streams at once, each captured."""
    out: Figures = {}
    options: dict[str, Any] = {"connections": STREAMS, "stream": True, "seconds": max(bench.seconds, 6)}
    for rate, chunk_ms in RATES.items():
        with bench.upstream(chunk_ms), bench.nats() as url, bench.gateway(url, STREAMS) as capture:
            (runs,) = bench.race([capture], warm_s=4.0, **options).values()
        best = max(runs, key=lambda run: run.chunks_per_core)
        out |= {
            f"{rate}_chunks_per_s_per_core": best.chunks_per_core,
            f"{rate}_chunks_per_s": best.load["chunks"] / best.load["seconds"],
            f"{rate}_gap_p99_ms": best.load["gap_p99_ms"],
            f"{rate}_closed": best.load["closed"],
        }
    return out


def bench_memory(bench: Bench, requests: int) -> Figures:
    """Resident memory of the capturing gateway over many calls, with 10,000 trajectories open all the time."""
    with bench.upstream(), bench.nats() as url, bench.gateway(url, OPEN) as capture:
        assert capture.process is not None

        def call(count: int) -> int:
            """Make at least `count` calls; return how many."""
            done = 0
            while done < count:
                run = bench.load(capture.port, path=capture.path, numbers=OPEN, seconds=max(bench.seconds, 5))
                if not run.whole:
                    raise RuntimeError(f"calls failed: {run.load}")
                done += run.load["requests"]
            return done

        call(OPEN * 10)  # then the gateway knows every trajectory, and each has 10 calls
        done, rss_mb = 0, [capture.process.memory_info().rss / 1e6]
        for _ in range(4):
            done += call(requests // 4)
            rss_mb.append(round(capture.process.memory_info().rss / 1e6, 1))
    return {"memory_requests": done, "memory_trajectories": OPEN, "rss_mb": rss_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[Bench], Figures]] = {
        "calls": bench_calls,
        "streams": bench_streams,
        "memory": lambda bench: bench_memory(bench, args.memory_requests),
    }
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="measure these parts only")
    parser.add_argument("--memory-requests", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway.json")
    args = parser.parse_args()
    out: Figures = {"seconds": args.seconds, **machine()}
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        bench = Bench(Path(folder), args.seconds)
        for name in args.only:
            figures = parts[name](bench)
            sys.stderr.write(f"{figures}\n")  # an interrupted run still shows something
            out |= figures
    write_results(args.out, out)


if __name__ == "__main__":
    main()
