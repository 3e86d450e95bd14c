"""Benchmark of the gateway's cost per call and per streamed chunk: `make bench-gateway`.

An instant inference server and a closed-loop client, both in C (`gateway_load.c`), on one core; the gateway on another.
Bodies are 2 KB. Figures per core are calls (or chunks) per second of the gateway's own CPU time, so a client that can't
keep it busy does not flatter or punish it; `*_rps` is throughput by wall-clock time. Latency is measured with all of
them on one core, and with the gateway on its own. A gateway without capture, one with capture and the bare server are
run five times, in turn, and the best run of each counts. Streams come at two rates: 50 chunks a second each, which is
more than one core passes on, and 20, which it is not.

    python -m benchmarks.gateway --seconds 1 --only calls latency   a quick try

Results go to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio

from benchmarks.bench import CONNECTIONS, RESULTS, STREAMS, Bench, Target, machine, write_results
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.kits.services import on_core

RATES = {"stream": 20.0, "stream_paced": 50.0}
"""Milliseconds between a stream's chunks."""
OPEN = 10_000
"""Trajectories open at once while memory is watched."""

Figures = dict[str, Any]


async def acknowledged_p50_ms(url: str, count: int = 3000) -> float:
    """Median milliseconds of an acknowledged publish of a captured call's size: the lower bound for capture."""
    took = []
    async with Broker.connect(NatsConfig(url=url), provision=False) as broker:
        for number in range(count):
            begun = time.perf_counter()
            await broker.publish_raw(f"rollout.floor.b.{number}", bytes(3000), {})
            took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1000


@contextlib.contextmanager
def targets(bench: Bench, trajectories: int) -> Iterator[tuple[list[Target], str]]:
    """Start a gateway without capture and one with capture before one server. Yield the server and both, and the
    log's address."""
    with (
        bench.upstream(), bench.nats() as url, bench.gateway(url, "off", "plain") as plain,
        bench.gateway(url, "acked", "capture", trajectories) as capture,
    ):  # fmt: skip
        yield [Target("direct", bench.upstream_port), plain, capture], url


def bench_calls(bench: Bench) -> Figures:
    out: Figures = {}
    with targets(bench, CONNECTIONS) as (raced, _):
        for name, runs in bench.race(raced).items():
            best = max(runs, key=lambda run: run.per_core or run.rps)
            out |= {f"{name}_rps": best.rps}
            if name != "direct":
                out |= {f"{name}_rps_per_core": best.per_core, f"{name}_p99_ms": best.load["p99_ms"]}
    return out


def bench_latency(bench: Bench) -> Figures:
    """One call after another: all on one core, then the gateways on a core of their own."""
    out: Figures = {}
    for suffix, placed in (("", bench.together()), ("_two_cores", contextlib.nullcontext())):
        with placed, targets(bench, 1) as (raced, url):
            p50 = {
                name: min(run.load["p50_ms"] for run in runs)
                for name, runs in bench.race(raced, connections=1).items()
            }
            with on_core(0):
                p50["acknowledged"] = anyio.run(
                    acknowledged_p50_ms, url, backend_options={"use_uvloop": True}
                )
            out |= {f"{name}_p50{suffix}_ms": value for name, value in p50.items()}
            out |= {f"added_p50{suffix}_ms": p50["capture"] - p50["direct"]}
    return out


def bench_streams(bench: Bench) -> Figures:
    """A thousand streams at once, each captured."""
    out: Figures = {}
    options: dict[str, Any] = {"connections": STREAMS, "stream": True, "seconds": max(bench.seconds, 6)}
    for rate, chunk_ms in RATES.items():
        with (
            bench.upstream(chunk_ms), bench.nats() as url, bench.gateway(url, "acked", "streams", STREAMS) as capture,
        ):  # fmt: skip
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
    with bench.upstream(), bench.nats() as url, bench.gateway(url, "acked", "memory", OPEN) as capture:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Bench], Figures]] = {
        "calls": bench_calls,
        "latency": bench_latency,
        "streams": bench_streams,
        "memory": lambda bench: bench_memory(bench, args.memory_requests),
    }
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=list(parts), help="measure these parts only"
    )
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
