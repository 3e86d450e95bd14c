"""Benchmark of the gateway's cost per call and per streamed chunk, next to other proxies: `make bench-gateway`.

An instant inference server and a closed-loop client, both in C (`gateway_load.c`), on one core; the proxy on another.
Bodies are 2 KB. Figures per core are calls (or chunks) per second of the proxy's own CPU time, all its processes
counted, so a client that can't keep a proxy busy does not flatter or punish it; `*_rps` is throughput by wall-clock
time. Latency is measured with all of them on one core, and with the proxy on its own. Each proxy is run five times,
in turn with the others, and the best run counts. Streams come at two rates: 50 chunks a second each, which is more
than one core passes on, and 20, which it is not.

    python -m benchmarks.gateway --peers DIR     DIR: a virtual environment with vllm-router and litellm[proxy]
    python -m benchmarks.gateway --install-peers  makes one at build/peers first
    python -m benchmarks.gateway --seconds 1 --only calls latency   a quick try

A peer that is not installed is skipped. Results go to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from benchmarks.gateway_peers import install_peers, litellm, nginx, vllm_router
from benchmarks.proxied import CONNECTIONS, HERE, PATH, STREAMS, Bench, Proxy, free_port, on_core, pinned
from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig, with_values
from pipeline.config import save as save_config
from pipeline.events import CheckpointPublished, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.sampler import SamplerThread

RESULTS = HERE / "results" / "gateway.json"
RATES = {"stream": 20.0, "stream_paced": 50.0}
"""Milliseconds between a stream's chunks."""
SWAPS, SWAP_STREAMS = 200, 64
OPEN = 10_000
"""Trajectories open at once while memory is watched."""
PARTS = ("calls", "latency", "streams", "litellm", "memory", "swaps")


@contextlib.contextmanager
def nats(bench: Bench) -> Iterator[str]:
    port = free_port()
    settings = bench.folder / "nats.conf"
    store = bench.folder / f"js-{port}"
    settings.write_text(f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{store}" }}\n')
    binary = str(Path(sys.executable).with_name("nats-server"))
    with bench.process([binary, "-c", str(settings)], core=1, ready=f"127.0.0.1:{port}"):
        yield f"nats://127.0.0.1:{port}"
    shutil.rmtree(store)


@contextlib.contextmanager
def gateway(
    bench: Bench, nats_url: str, capture: str, name: str
) -> Iterator[tuple[psutil.Process, int, Config]]:
    port = free_port()
    config = Config(
        project="bench",
        run_dir=str(bench.folder / name),
        log_level="WARNING",
        nats=NatsConfig(url=nats_url),
        vllm=VllmConfig(urls=(f"http://127.0.0.1:{bench.upstream_port}",)),
        models=(ModelConfig(name="policy"),),
        gateway=GatewayConfig(port=port, capture=capture),  # type: ignore[arg-type]
    )
    save_config(config, config.path("config.toml"))
    command = [sys.executable, "-m", "rollout_gateway", "--config", str(config.path("config.toml"))]
    env = {"PYTHONPATH": str(HERE.parent)}
    agent = SamplerThread(with_values(config, {"run_dir": str(bench.folder / f"{name}-sampler")}))
    with bench.process(command, core=0, ready=f"http://127.0.0.1:{port}/health", env=env) as process:
        agent.start()
        try:
            yield process, port, config
        finally:
            agent.stop()


async def open_trajectories(config: Config, count: int) -> None:
    async with Broker.connect(config.nats) as broker:
        for number in range(count):
            await broker.publish(
                TrajectoryOpened(project="bench", trajectory=f"b{number}", model="policy", group="g")
            )


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
def ours(bench: Bench, url: str, trajectories: int) -> Iterator[tuple[Proxy, Proxy]]:
    """Start a gateway without capture and one with capture, and open `trajectories` trajectories on the latter."""
    with (
        gateway(bench, url, "off", "plain") as (plain, plain_port, _),
        gateway(bench, url, "acked", "acked") as (captures, port, config),
    ):
        anyio.run(open_trajectories, config, trajectories)
        yield (
            Proxy("plain", plain_port, plain, peer=False),
            Proxy("capture", port, captures, f"/t/b%d{PATH}", peer=False),
        )
    shutil.rmtree(config.run_dir)


@contextlib.contextmanager
def all_proxies(bench: Bench, peers: Path, trajectories: int) -> Iterator[tuple[list[Proxy], str]]:
    """Start the gateway, vLLM's router and nginx before one server; yield them, no proxy, and the log's address."""
    with (
        bench.upstream(), nats(bench) as url, ours(bench, url, trajectories) as (plain, captures),
        vllm_router(bench, peers) as router, nginx(bench) as fast,
    ):  # fmt: skip
        direct = Proxy("direct", bench.upstream_port)
        yield [p for p in (direct, plain, captures, router, fast) if p is not None], url


def bench_calls(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    with all_proxies(bench, peers, CONNECTIONS) as (proxies, _):
        for name, runs in bench.race(proxies).items():
            if not runs:
                continue  # in every run of this peer a call failed
            best = max(runs, key=lambda run: run.per_core or run.rps)
            out |= {f"{name}_rps": best.rps}
            if name != "direct":
                out |= {f"{name}_rps_per_core": best.per_core}
            if name == "capture":
                out |= {"capture_p99_ms": best.load["p99_ms"]}


def bench_latency(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    """One call after another: all on one core, then the proxies on a core of their own."""
    for suffix, placed in (("", bench.together()), ("_two_cores", contextlib.nullcontext())):
        with placed, all_proxies(bench, peers, 1) as (proxies, url):
            raced = bench.race(proxies, connections=1).items()
            p50 = {name: min(run.load["p50_ms"] for run in runs) for name, runs in raced if runs}
            with on_core(0):
                p50["acknowledged"] = anyio.run(
                    acknowledged_p50_ms, url, backend_options={"use_uvloop": True}
                )
            out |= {f"{name}_p50{suffix}_ms": value for name, value in p50.items()}
            out |= {f"added_p50{suffix}_ms": p50["capture"] - p50["direct"]}


def bench_streams(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    """A thousand streams at once, each captured."""
    for rate, chunk_ms in RATES.items():
        with (
            bench.upstream(chunk_ms), nats(bench) as url, ours(bench, url, STREAMS) as (_, captures),
            vllm_router(bench, peers) as router,
        ):  # fmt: skip
            proxies = [captures, router] if router is not None else [captures]
            raced = bench.race(
                proxies, connections=STREAMS, stream=True, warm_s=4.0, seconds=max(bench.seconds, 6)
            )
        for name, runs in raced.items():
            if not runs:  # in every run of this peer a call failed
                out |= {f"{name}_{rate}_chunks_per_s_per_core": None}
                continue
            best = max(runs, key=lambda run: run.chunks_per_core)
            of = "" if name == "capture" else f"{name}_"
            out |= {
                f"{of}{rate}_chunks_per_s_per_core": best.chunks_per_core,
                f"{of}{rate}_chunks_per_s": best.load["chunks"] / best.load["seconds"],
                f"{of}{rate}_gap_p99_ms": best.load["gap_p99_ms"], f"{of}{rate}_closed": best.load["closed"],
            }  # fmt: skip


def bench_litellm(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    with bench.upstream(), litellm(bench, peers) as proxy:
        if proxy is not None:
            # litellm takes seconds for each of its first answers: a longer warm-up.
            (runs,) = bench.race([proxy], connections=8, warm_s=15, seconds=max(bench.seconds, 10)).values()
            best = max(runs, key=lambda run: run.per_core, default=None)
            if best is not None:
                out |= {"litellm_rps_per_core": best.per_core, "litellm_rps": best.rps}


def bench_memory(bench: Bench, out: dict[str, Any], requests: int) -> None:
    """Resident memory of the capturing gateway over many calls, with 10,000 trajectories open all the time."""
    with (
        bench.upstream(),
        nats(bench) as url,
        gateway(bench, url, "acked", "memory") as (process, port, config),
    ):
        anyio.run(open_trajectories, config, OPEN)
        options: dict[str, Any] = {"path": f"/t/b%d{PATH}", "numbers": OPEN, "seconds": max(bench.seconds, 5)}
        done, seen = 0, []
        while done < OPEN * 10:  # then the gateway knows every trajectory, and each has 10 calls
            done += bench.load(port, **options).load["requests"]
        seen.append(process.memory_info().rss / 1e6)
        done, quarter = 0, 1
        while done < requests:
            load = bench.load(port, **options).load
            if load["failed"] or load["closed"]:
                raise RuntimeError(f"calls failed: {load}")
            done += load["requests"]
            if done >= requests * quarter / 4:
                quarter += 1
                seen.append(process.memory_info().rss / 1e6)
        out |= {
            "memory_requests": done, "memory_trajectories": OPEN, "rss_start_mb": seen[0],
            "rss_end_mb": seen[-1], "rss_mb": [round(mb, 1) for mb in seen],
        }  # fmt: skip


# -- swaps ------------------------------------------------------------------------------------------------------------


def an_adapter(step: int) -> bytes:
    """Return a tar archive that can be unpacked. Its content is not used: the benchmark's server loads no adapter."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("adapter_config.json")
        data = json.dumps({"r": 8, "step": step}).encode()
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


async def publish_swaps(config: Config, count: int, seconds: float) -> None:
    async with Broker.connect(config.nats) as broker:
        for step in range(1, count + 1):
            data = an_adapter(step)
            digest = hashlib.sha256(data).hexdigest()
            await broker.put_object("ADAPTERS", f"bench/{step}", data)
            await broker.publish(
                CheckpointPublished(
                    project="bench",
                    model="policy",
                    step=step,
                    version=f"policy@{step}",
                    parent=f"policy@{step - 1}",
                    batch_id=str(step),
                    groups=(),
                    config_hash="",
                    adapter=f"bench/{step}",
                    adapter_sha256=digest,
                    adapter_bytes=len(data),
                )
            )
            await anyio.sleep(seconds / count)


def bench_swaps(bench: Bench, out: dict[str, Any]) -> None:
    """The gaps between chunks of 64 streams, without and with 200 adapter swaps meanwhile."""
    path = f"/t/b%d{PATH}"
    seconds = max(bench.seconds * 3, 6)
    with bench.upstream(), nats(bench) as url, gateway(bench, url, "acked", "swaps") as (_, port, config):
        anyio.run(open_trajectories, config, SWAP_STREAMS)
        options: dict[str, Any] = {"path": path, "connections": SWAP_STREAMS, "stream": True}
        bench.load(port, **options, seconds=2)
        calm = bench.load(port, **options, seconds=seconds)
        with contextlib.ExitStack() as stack:
            publisher = subprocess.Popen(
                [*pinned(1), sys.executable, "-m", "benchmarks.gateway", "--publish-swaps",
                 str(config.path("config.toml")), "--seconds", str(seconds * 0.9)],
                cwd=HERE.parent,
            )  # fmt: skip
            stack.callback(publisher.wait)
            swapped = bench.load(port, **options, seconds=seconds)
        policies = httpx.get(f"http://127.0.0.1:{port}/v1/policies", timeout=30).json()["data"][0]
        out |= {
            "swaps": policies["step"], "swap_failures": swapped.load["failed"] + swapped.load["closed"],
            "swap_p99_gap_ms": swapped.load["gap_p99_ms"], "calm_p99_gap_ms": calm.load["gap_p99_ms"],
            "swap_p99_gap_ratio": swapped.load["gap_p99_ms"] / calm.load["gap_p99_ms"],
        }  # fmt: skip


# -- all of it ---------------------------------------------------------------------------------------------------------


class Progress(dict[str, Any]):
    """Prints each result when it is measured, so that an interrupted run still shows something."""

    def __ior__(self, other: Any) -> Progress:  # type: ignore[override,misc]
        sys.stderr.write("".join(f"{name} {value}\n" for name, value in dict(other).items()))
        self.update(other)
        return self


def run(seconds: float, peers: Path, only: tuple[str, ...], memory_requests: int) -> dict[str, Any]:
    out: dict[str, Any] = Progress()
    out |= {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
        "cores": os.cpu_count(), "seconds": seconds, "load_before": os.getloadavg()[0],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        bench = Bench(Path(folder), seconds)
        parts: dict[str, Callable[[], None]] = {
            "calls": lambda: bench_calls(bench, out, peers),
            "latency": lambda: bench_latency(bench, out, peers),
            "streams": lambda: bench_streams(bench, out, peers),
            "litellm": lambda: bench_litellm(bench, out, peers),
            "memory": lambda: bench_memory(bench, out, memory_requests),
            "swaps": lambda: bench_swaps(bench, out),
        }
        for name, part in parts.items():
            if name in only:
                part()
    for name in ("vllm_router", "litellm"):
        if out.get(f"{name}_rps_per_core") and "capture_rps_per_core" in out:
            out[f"capture_over_{name}"] = out["capture_rps_per_core"] / out[f"{name}_rps_per_core"]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--peers", type=Path, default=Path("build/peers"))
    parser.add_argument("--install-peers", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these parts only")
    parser.add_argument("--merge", action="store_true", help="keep the other parts that --out holds")
    parser.add_argument("--memory-requests", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--publish-swaps", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish_swaps is not None:
        from pipeline.config import load

        anyio.run(publish_swaps, load(args.publish_swaps), SWAPS, args.seconds)
        return
    if args.install_peers:
        install_peers(args.peers)
    results = run(args.seconds, args.peers.absolute(), tuple(args.only), args.memory_requests)
    if args.merge and args.out.exists():
        results = {**json.loads(args.out.read_text()), **results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
