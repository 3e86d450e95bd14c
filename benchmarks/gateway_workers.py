"""Benchmark of a gateway of several processes: `python -m benchmarks.gateway_workers`.

The machine's cores are shared by the gateway, an instant inference server, a closed-loop client (both in C,
`gateway_load.c`) and the NATS server. Therefore each count of workers is measured in two ways:

- `share_*`: every gateway process may use `--share` of a core (a cgroup's CPU quota), so that client, server and log
  are never the limit. The ratio of the calls per second is what a further core gives.
- `free_*`: no quota. Calls per second of wall-clock time, and per second of the gateway's CPU time, all its processes
  counted.

One and two workers take turns (`--tries`), and the median counts. `connections_*` shows how evenly kept-alive
connections are divided, by the way a connection finds its worker: `handover` is the gateway's; `reuseport` and
`shared_socket` are the kernel's, measured with processes that only accept.

    python -m benchmarks.gateway_workers --seconds 2 --tries 3

Results go to benchmarks/results/gateway_workers.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import uvloop

from benchmarks.gateway import nats
from benchmarks.proxied import CONNECTIONS, HERE, PATH, Bench, Measured, cpu_seconds, free_port
from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig, with_values
from pipeline.config import save as save_config
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.sampler import SamplerThread

RESULTS = HERE / "results" / "gateway_workers.json"
COUNTS = (1, 2)
PERIOD_US = 20_000
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")


@contextlib.contextmanager
def gateway(
    bench: Bench, nats_url: str, capture: str, workers: int
) -> Iterator[tuple[psutil.Process, Config]]:
    """A gateway that may use every core."""
    port = free_port()
    config = Config(
        project="bench",
        run_dir=str(bench.folder / f"{capture}-{workers}"),
        log_level="WARNING",
        nats=NatsConfig(url=nats_url),
        vllm=VllmConfig(urls=(f"http://127.0.0.1:{bench.upstream_port}",)),
        models=(ModelConfig(name="policy"),),
        gateway=GatewayConfig(port=port, capture=capture, workers=workers),  # type: ignore[arg-type]
    )
    save_config(config, config.path("config.toml"))
    agent = SamplerThread(with_values(config, {"run_dir": str(config.path("sampler"))}))
    log = (bench.folder / "gateway.log").open("ab")
    command = [sys.executable, "-m", "rollout_gateway", "--config", str(config.path("config.toml"))]
    read, write = os.pipe()
    with log:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(write)], stdout=log, stderr=log, pass_fds=(write,), cwd=HERE.parent
        )
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            if not pipe.readline():
                raise RuntimeError((bench.folder / "gateway.log").read_text()[-2000:])
            agent.start()
            while not httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).json()["serving"]:
                time.sleep(0.05)
            yield psutil.Process(process.pid), config
    finally:
        agent.stop()
        process.terminate()
        process.wait(60)


def processes(gateway: psutil.Process) -> list[psutil.Process]:
    """The processes that answer calls: the workers, or the only one."""
    return gateway.children(recursive=True) or [gateway]


async def open_trajectories(config: Config, count: int, prefix: str) -> None:
    async with Broker.connect(config.nats) as broker:
        for number in range(count):
            opened = TrajectoryOpened(
                project="bench", trajectory=f"{prefix}{number}", model="policy", group="g"
            )
            await broker.publish(opened)


@contextlib.contextmanager
def shares(gateway: psutil.Process, share: float) -> Iterator[None]:
    """Let each process that answers calls use `share` of a core, where this machine permits cgroups."""
    groups = []
    try:
        for number, process in enumerate(processes(gateway)):
            group = _CPU_GROUPS / f"journeywork-bench-{os.getpid()}-{number}"
            group.mkdir()
            groups.append(group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for group in groups:
            for pid in (group / "cgroup.procs").read_text().split():
                (_CPU_GROUPS / "cgroup.procs").write_text(pid)
            group.rmdir()


def load(
    bench: Bench, config: Config, process: psutil.Process, path: str, *, warming: bool = False
) -> Measured:
    """One run of the client, which the scheduler may put on any core."""
    command = [
        str(bench.program), "load", str(config.gateway.port), path, str(CONNECTIONS), str(bench.seconds),
        str(bench.plain_body), "", "0",
    ]  # fmt: skip
    before = cpu_seconds(process)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    run = Measured(json.loads(done.stdout), cpu_seconds(process) - before)
    if not run.whole and not warming:
        raise RuntimeError(f"calls failed: {path} {config.gateway.workers} {run.load}")
    return run


def bench_calls(bench: Bench, out: dict[str, Any], capture: str, tries: int, share: float) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(bench.upstream())
        url = stack.enter_context(nats(bench))
        fronts = {n: stack.enter_context(gateway(bench, url, capture, n)) for n in COUNTS}
        modes = ["free", *(["share"] if os.access(_CPU_GROUPS / "cgroup.procs", os.W_OK) else [])]
        runs: dict[tuple[str, int], list[Measured]] = {(m, n): [] for m in modes for n in COUNTS}
        for turn in range(tries + 1):
            for mode, workers in runs:
                process, config = fronts[workers]
                limited = shares(process, share) if mode == "share" else contextlib.nullcontext()
                path = PATH
                if capture == "acked":  # new runs: a worker reads what another one recorded of a run first
                    prefix = f"{mode}-{workers}-{turn}-"
                    anyio.run(open_trajectories, config, CONNECTIONS, prefix)
                    path = f"/t/{prefix}%d{PATH}"
                with limited:
                    runs[mode, workers].append(load(bench, config, process, path, warming=not turn))
    for mode in modes:
        rates = {n: statistics.median(r.rps for r in runs[mode, n][1:]) for n in COUNTS}
        per_core = {n: statistics.median(r.per_core for r in runs[mode, n][1:]) for n in COUNTS}
        out[f"{capture}_{mode}"] = {
            **{f"workers_{n}_rps": round(rates[n], 1) for n in COUNTS},
            **{f"workers_{n}_rps_per_core": round(per_core[n], 1) for n in COUNTS},
            "rps_ratio": round(rates[2] / rates[1], 3),
            "per_core_ratio": round(per_core[2] / per_core[1], 3),
            "p99_ms": {n: statistics.median(r.load["p99_ms"] for r in runs[mode, n][1:]) for n in COUNTS},
        }
        sys.stderr.write(f"{capture}_{mode} {out[f'{capture}_{mode}']}\n")


# -- how connections are divided ---------------------------------------------------------------------------------------


def accept(listener: socket.socket) -> None:
    """A process that accepts, keeps what it accepted, and says on SIGTERM how much that was."""
    kept: list[asyncio.BaseTransport] = []

    class Keep(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            kept.append(transport)

    async def serve() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(15, done.set)
        await loop.create_server(Keep, sock=listener, backlog=4096)
        print("ready", flush=True)
        await done.wait()
        print(len(kept), flush=True)
        os._exit(0)

    uvloop.run(serve())


def divided(way: str, workers: int, connections: int) -> list[int]:
    """How many of the connections, made at once, each worker has when the kernel divides them."""

    def listening(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(4096)
        listener.setblocking(False)
        return listener

    first = listening(0)
    port = first.getsockname()[1]
    sockets = (
        [first] * workers
        if way == "shared_socket"
        else [first, *(listening(port) for _ in range(workers - 1))]
    )
    children = []
    for listener in sockets:
        fd = listener.fileno()
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gateway_workers", "--accept", str(fd)],
                pass_fds=(fd,),
                stdout=subprocess.PIPE,
                text=True,
                cwd=HERE.parent,
            )
        )
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    time.sleep(0.3)  # until all are accepted: nothing tells
    counts = []
    for child in children:
        child.terminate()
        assert child.stdout is not None
        counts.append(int(child.stdout.readline()))
        child.wait()
    for one in (*clients, *set(sockets)):
        one.close()
    return counts


def handed_over(bench: Bench, workers: int, connections: int) -> list[int]:
    """The same for the gateway's own way."""
    with bench.upstream(), nats(bench) as url, gateway(bench, url, "off", workers) as (process, config):
        clients = [socket.create_connection(("127.0.0.1", config.gateway.port)) for _ in range(connections)]
        time.sleep(0.3)  # until all are handed over: nothing tells
        port = config.gateway.port
        counts = [
            sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in p.net_connections("tcp"))
            for p in processes(process)
        ]
        for one in clients:
            one.close()
    return counts


def bench_balance(bench: Bench, out: dict[str, Any]) -> None:
    for workers, connections in ((2, 16), (4, 32)):
        shown = {"handover": [max(handed_over(bench, workers, connections))]}
        for way in ("reuseport", "shared_socket"):
            shown[way] = sorted(max(divided(way, workers, connections)) for _ in range(9))
        # The busiest worker bounds the throughput of connections that are all equally busy.
        out[f"connections_{connections}_on_{workers}"] = {
            way: {
                "most_on_one_worker_median": statistics.median(most),
                "most_on_one_worker_worst": max(most),
                "usable_share": round(connections / workers / statistics.median(most), 3),
            }
            for way, most in shown.items()
        }
        sys.stderr.write(f"{connections} on {workers}: {out[f'connections_{connections}_on_{workers}']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each run")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.3, help="share of a core that each process may use")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", nargs="+", choices=("balance", "off", "acked"), default=("balance", "off", "acked")
    )
    parser.add_argument("--accept", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.accept is not None:
        accept(socket.socket(fileno=args.accept))
        return
    out: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "cores": os.cpu_count(), "seconds": args.seconds, "tries": args.tries, "share": args.share,
        "load_before": os.getloadavg()[0],
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="bench-workers-"))
    try:
        bench = Bench(folder, args.seconds)
        if "balance" in args.only:
            bench_balance(bench, out)
        for capture in ("off", "acked"):
            if capture in args.only:
                bench_calls(bench, out, capture, args.tries, args.share)
    finally:
        shutil.rmtree(folder)
    if args.out.exists():
        out = {**json.loads(args.out.read_text()), **out}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(out, indent=2) + "\n")
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
