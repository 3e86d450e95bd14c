"""Benchmark of what tracing costs the gateway: CPU time per captured call with the telemetry service at work, beside it
suspended, in turns.

    python -m benchmarks.tracing                 about three minutes
    python -m benchmarks.tracing --seconds 1     a quick try

One gateway (every call acknowledged by the log) under a closed-loop client, before an instant server; the gateway has
a core of its own, everything else has the other. In each of `TRIES` rounds it is measured three times: `off` (the
telemetry service is suspended), `on` (it exports to a collector) and `dead` (it tries a port where nothing listens).
The compared figure is the gateway's own CPU time per call, by the median of the rounds' ratios; all calls have to be
answered. Results go to benchmarks/results/tracing.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import psutil

from benchmarks.gateway import gateway, nats, open_trajectories
from benchmarks.proxied import CONNECTIONS, HERE, PATH, TRIES, Bench, free_port
from pipeline.config import Config

RESULTS = HERE / "results" / "tracing.json"
LIMIT = 1.10
"""Largest CPU time per call with tracing, over that without."""


@contextlib.contextmanager
def collector() -> Iterator[tuple[int, list[int]]]:
    """A collector that accepts everything; yields its port, and the bytes of each request."""
    got: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def telemetry(bench: Bench, config: Config, nats_port: str, collector_port: int) -> Iterator[psutil.Process]:
    """The telemetry service, suspended."""
    env = {
        "PYTHONPATH": str(HERE.parent),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector_port}",
    }
    settings = str(config.path("config.toml"))
    command = [sys.executable, "-m", "pipeline.telemetry.exporter", "--config", settings]
    with bench.process(command, core=1, ready=nats_port, env=env) as process:
        time.sleep(5)  # it has no address to ask: the time of its start is not measured
        process.suspend()
        try:
            yield process
        finally:
            process.resume()


def measure(bench: Bench, out: dict[str, Any]) -> None:
    with (
        bench.upstream(), nats(bench) as url, gateway(bench, url, "acked", "traced") as (process, port, config),
        collector() as (collector_port, got),
    ):  # fmt: skip
        anyio.run(open_trajectories, config, CONNECTIONS)
        address = url.removeprefix("nats://")
        with (
            telemetry(bench, config, address, collector_port) as exporter,
            telemetry(bench, config, address, free_port()) as dead,
        ):
            working: dict[str, psutil.Process | None] = {"off": None, "on": exporter, "dead": dead}
            options: dict[str, Any] = {"path": f"/t/b%d{PATH}", "proxy": process}
            bench.load(port, **options, seconds=1)
            cpu: dict[str, list[float]] = {name: [] for name in working}
            rps: dict[str, list[float]] = {name: [] for name in working}
            for number in range(TRIES):
                # The order turns, so that no state is always the first.
                for name in (*list(working)[number % 3 :], *list(working)[: number % 3]):
                    if (at_work := working[name]) is not None:
                        at_work.resume()
                    run = bench.load(port, **options)
                    if at_work is not None:
                        at_work.suspend()
                    if not run.whole:
                        raise RuntimeError(f"{name}: calls failed: {run.load}")
                    cpu[name].append(run.cpu_s / run.load["requests"] * 1e6)
                    rps[name].append(run.rps)
                    sys.stderr.write(f"{name}: {cpu[name][-1]:.1f} us of CPU a call, {run.rps:.0f} calls/s\n")
        if not got:
            raise RuntimeError("the collector got no spans, so nothing was compared")
        for name, figures in cpu.items():
            out[f"{name}_cpu_us_per_call"] = statistics.median(figures)
            out[f"{name}_rps_two_cores_for_all"] = statistics.median(rps[name])
            if name != "off":
                ratios = [a / b for a, b in zip(figures, cpu["off"], strict=True)]
                out[f"{name}_over_off"] = statistics.median(ratios)
        out |= {"collector_requests": len(got), "collector_mb": sum(got) / 1e6, "failed_calls": 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each run")
    args = parser.parse_args()
    out: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "cores": os.cpu_count(), "seconds": args.seconds, "load_before": os.getloadavg()[0], "limit": LIMIT,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-tracing-") as folder:
        measure(Bench(Path(folder), args.seconds), out)
    out = {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}
    RESULTS.write_text(json.dumps(out, indent=2) + "\n")
    print(json.dumps(out, indent=2))
    if max(out["on_over_off"], out["dead_over_off"]) >= LIMIT:
        raise SystemExit(f"tracing costs the gateway more than {LIMIT - 1:.0%}")


if __name__ == "__main__":
    main()
