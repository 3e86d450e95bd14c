"""What the gateway costs a call, beside other proxies, on this machine in this run: `make bench-gateway`.

An instant inference server and a closed-loop client, both in C (`gateway_load.c`), on one core; the proxy on another.
Bodies are 2 KB. Figures per core are calls (or chunks) per second of the proxy's own CPU time, all its processes
counted, so a client that can't keep a proxy busy does not flatter or punish it; `*_rps` is what went through by the clock.

    python -m benchmarks.gateway --peers DIR     DIR: a virtual environment with vllm-router and litellm[proxy]
    python -m benchmarks.gateway --install-peers  makes one at build/peers first
    python -m benchmarks.gateway --seconds 1 --only gateway vllm_router   a quick try

A peer that is not installed is skipped, and its fields are null. Results go to benchmarks/results/gateway.json.
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
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil

from pipeline.broker import Broker
from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig
from pipeline.config import save as save_config
from pipeline.events import CheckpointPublished, TrajectoryOpened

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gateway.json"
CONNECTIONS = 32
STREAMS = 1000
CHUNK_MS = 50
SWAPS, SWAP_STREAMS = 200, 64
OPEN = 10_000
"""Trajectories open at once while memory is watched."""
PARTS = ("gateway", "streams", "nginx", "vllm_router", "litellm", "memory", "swaps")
PATH = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(core: int) -> list[str]:
    """Prefix that keeps a command on one core, where there are two."""
    return ["taskset", "-c", str(core)] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else []


@dataclass
class Measured:
    """One run of the client against one proxy."""

    load: dict[str, Any]
    cpu_s: float

    @property
    def rps(self) -> float:
        return float(self.load["requests"] / self.load["seconds"])

    @property
    def per_core(self) -> float:
        """Calls per second of the proxy's CPU time."""
        return float(self.load["requests"] / self.cpu_s) if self.cpu_s else 0.0

    @property
    def chunks_per_core(self) -> float:
        return float(self.load["chunks"] / self.cpu_s) if self.cpu_s else 0.0


class Bench:
    """The programs, files and processes of one benchmark."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.program = folder / "gateway_load"
        subprocess.run(["cc", "-O2", "-o", str(self.program), str(HERE / "gateway_load.c")], check=True)
        self.plain_body = self._body("plain.json", stream=False)
        self.stream_body = self._body("stream.json", stream=True)
        self.stack = contextlib.ExitStack()

    def _body(self, name: str, *, stream: bool) -> Path:
        body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "x" * 1940}]}
        path = self.folder / name
        path.write_text(json.dumps(body))
        return path

    @contextlib.contextmanager
    def process(
        self, command: list[str], *, core: int, ready: str, env: dict[str, str] | None = None
    ) -> Iterator[psutil.Process]:
        """A process that answers `ready` (an URL, or host:port), ended afterwards."""
        log = self.folder / f"{Path(command[0]).name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                pinned(core) + command,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, **(env or {})},
            )
        try:
            deadline = time.monotonic() + 90
            while not answers(ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    def upstream(self, chunk_ms: float = CHUNK_MS) -> contextlib.AbstractContextManager[psutil.Process]:
        self.upstream_port = free_port()
        return self.process(
            [str(self.program), "serve", str(self.upstream_port), str(chunk_ms)], core=1,
            ready=f"127.0.0.1:{self.upstream_port}",
        )  # fmt: skip

    def load(
        self, port: int, *, path: str = PATH, connections: int = CONNECTIONS, stream: bool = False,
        header: str = "", proxy: psutil.Process | None = None, seconds: float = 0, numbers: int = 0,
    ) -> Measured:  # fmt: skip
        """One run of the client; `%d` in `path` is the connection's number, or each of `numbers` in turn."""
        body = self.stream_body if stream else self.plain_body
        command = [
            *pinned(1), str(self.program), "load", str(port), path, str(connections),
            str(seconds or self.seconds), str(body), header, str(numbers),
        ]  # fmt: skip
        before = cpu_seconds(proxy)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return Measured(json.loads(done.stdout), cpu_seconds(proxy) - before)

    def rounds(self, port: int, *, warm_s: float = 1.0, **options: Any) -> Measured:
        """A warm-up, then the run that counts."""
        self.load(port, **{**options, "seconds": warm_s})
        measured = self.load(port, **options)
        if not measured.load["requests"] and not measured.load["chunks"]:
            raise RuntimeError(f"nothing was answered: {measured.load}")
        if measured.load["failed"] or measured.load["closed"]:
            raise RuntimeError(f"calls failed: {measured.load}")
        return measured


def cpu_seconds(process: psutil.Process | None) -> float:
    """CPU time of a process and all below it."""
    if process is None:
        return 0.0
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def answers(ready: str) -> bool:
    try:
        if ready.startswith("http"):
            return httpx.get(ready, timeout=2).status_code < 500
        host, _, port = ready.partition(":")
        with socket.create_connection((host, int(port)), 1):
            return True
    except (OSError, httpx.HTTPError):
        return False


# -- the gateway ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nats(bench: Bench) -> Iterator[str]:
    port = free_port()
    settings = bench.folder / "nats.conf"
    settings.write_text(
        f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{bench.folder / "js"}" }}\n'
    )
    binary = str(Path(sys.executable).with_name("nats-server"))
    with bench.process([binary, "-c", str(settings)], core=1, ready=f"127.0.0.1:{port}"):
        yield f"nats://127.0.0.1:{port}"


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
    with bench.process(command, core=0, ready=f"http://127.0.0.1:{port}/health", env=env) as process:
        yield process, port, config


async def open_trajectories(config: Config, count: int) -> None:
    async with Broker.connect(config.nats) as broker:
        for number in range(count):
            await broker.publish(
                TrajectoryOpened(project="bench", trajectory=f"b{number}", model="policy", group="g")
            )


def bench_gateway(bench: Bench, out: dict[str, Any]) -> None:
    path = f"/t/b%d{PATH}"
    with nats(bench) as url:
        with gateway(bench, url, "off", "plain") as (process, port, _):
            plain = bench.rounds(port, proxy=process)
            one = bench.rounds(port, connections=1, proxy=process)
            out |= {
                "plain_rps_per_core": plain.per_core,
                "plain_rps": plain.rps,
                "plain_p50_ms": one.load["p50_ms"],
            }
        with gateway(bench, url, "acked", "acked") as (process, port, config):
            anyio.run(open_trajectories, config, CONNECTIONS)
            captured = bench.rounds(port, path=path, proxy=process)
            one = bench.rounds(port, path=path, connections=1, proxy=process)
            out |= {
                "capture_rps_per_core": captured.per_core, "capture_rps": captured.rps,
                "capture_p99_ms": captured.load["p99_ms"], "capture_p50_ms": one.load["p50_ms"],
                "added_p50_ms": one.load["p50_ms"] - out["direct_p50_ms"],
            }  # fmt: skip


def bench_streams(bench: Bench, out: dict[str, Any]) -> None:
    """A thousand streams at once, each captured."""
    with nats(bench) as url, gateway(bench, url, "acked", "streams") as (process, port, config):
        anyio.run(open_trajectories, config, STREAMS)
        options: dict[str, Any] = {"path": f"/t/b%d{PATH}", "connections": STREAMS, "stream": True}
        streams = bench.rounds(
            port, **options, proxy=process, warm_s=CHUNK_MS * 0.06, seconds=max(bench.seconds, 6)
        )
        out |= {
            "stream_chunks_per_s_per_core": streams.chunks_per_core,
            "stream_chunks_per_s": streams.load["chunks"] / streams.load["seconds"],
            "stream_gap_p99_ms": streams.load["gap_p99_ms"], "stream_closed": streams.load["closed"],
        }  # fmt: skip


def bench_memory(bench: Bench, out: dict[str, Any], requests: int) -> None:
    """Resident memory of the capturing gateway over many calls, with 10,000 trajectories open all the time."""
    with nats(bench) as url, gateway(bench, url, "acked", "memory") as (process, port, config):
        anyio.run(open_trajectories, config, OPEN)
        options: dict[str, Any] = {"path": f"/t/b%d{PATH}", "numbers": OPEN, "seconds": max(bench.seconds, 5)}
        done, seen = 0, []
        while done < OPEN * 10:  # every trajectory is known and has as many calls as are remembered of one
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
    """A tar that unpacks; the instant server loads nothing of it."""
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
    with nats(bench) as url, gateway(bench, url, "acked", "swaps") as (process, port, config):
        anyio.run(open_trajectories, config, SWAP_STREAMS)
        options: dict[str, Any] = {
            "path": path,
            "connections": SWAP_STREAMS,
            "stream": True,
            "proxy": process,
        }
        calm = bench.rounds(port, **options, seconds=seconds)
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


# -- peers ------------------------------------------------------------------------------------------------------------


def bench_nginx(bench: Bench, out: dict[str, Any]) -> None:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        out["nginx_rps_per_core"] = None
        sys.stderr.write("nginx is not installed (apt-get install nginx-light): skipped\n")
        return
    port = free_port()
    settings = bench.folder / "nginx.conf"
    settings.write_text(
        f"daemon off; worker_processes 1; pid {bench.folder}/nginx.pid; error_log {bench.folder}/nginx-error.log;\n"
        "events { worker_connections 4096; }\n"
        "http { access_log off; keepalive_requests 100000000; client_body_buffer_size 64k;\n"
        f"  upstream up {{ server 127.0.0.1:{bench.upstream_port}; keepalive 256; keepalive_requests 100000000; }}\n"
        f"  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://up; proxy_http_version 1.1;\n"
        '    proxy_set_header Connection ""; } } }\n'
    )
    command = [binary, "-c", str(settings), "-p", str(bench.folder)]
    with bench.process(command, core=0, ready=f"127.0.0.1:{port}") as process:
        measured = bench.rounds(port, proxy=process)
    out |= {"nginx_rps_per_core": measured.per_core, "nginx_rps": measured.rps}


def bench_vllm_router(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    binary = peers / "bin" / "vllm-router"
    if not binary.exists():
        out["vllm_router_rps_per_core"] = None
        sys.stderr.write(f"{binary} is not there: skipped\n")
        return
    port, metrics = free_port(), free_port()
    command = [
        str(binary), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error",
        "--worker-urls", f"http://127.0.0.1:{bench.upstream_port}", "--prometheus-port", str(metrics),
    ]  # fmt: skip
    with bench.process(command, core=0, ready=f"http://127.0.0.1:{port}/health") as process:
        measured = bench.rounds(port, proxy=process)
        streams = bench.rounds(
            port,
            connections=STREAMS,
            stream=True,
            proxy=process,
            warm_s=CHUNK_MS * 0.06,
            seconds=max(bench.seconds, 6),
        )
    out |= {
        "vllm_router_rps_per_core": measured.per_core, "vllm_router_rps": measured.rps,
        "vllm_router_stream_chunks_per_s_per_core": streams.chunks_per_core,
    }  # fmt: skip


def bench_litellm(bench: Bench, out: dict[str, Any], peers: Path) -> None:
    binary = peers / "bin" / "litellm"
    if not binary.exists():
        out["litellm_rps_per_core"] = None
        sys.stderr.write(f"{binary} is not there: skipped\n")
        return
    port = free_port()
    settings = bench.folder / "litellm.yaml"
    settings.write_text(
        json.dumps({
            "model_list": [{
                "model_name": "policy",
                "litellm_params": {
                    "model": "openai/policy", "api_key": "none",
                    "api_base": f"http://127.0.0.1:{bench.upstream_port}/v1",
                },
            }],
            "litellm_settings": {"telemetry": False},
        })
    )  # fmt: skip
    command = [str(binary), "--config", str(settings), "--host", "127.0.0.1", "--port", str(port)]
    env = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # Without a key it does less for each call, which is in its favour.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "PATH": f"{peers / 'bin'}:{os.environ['PATH']}",
    }
    with bench.process(
        command, core=0, ready=f"http://127.0.0.1:{port}/health/liveliness", env=env
    ) as process:
        # Its first answers take seconds each.
        measured = bench.rounds(port, proxy=process, connections=8, warm_s=15, seconds=max(bench.seconds, 10))
    out |= {"litellm_rps_per_core": measured.per_core, "litellm_rps": measured.rps}


# -- all of it --------------------------------------------------------------------------------------------------------


class Progress(dict[str, Any]):
    """Results that are said as they come, so that a run that breaks off has not been for nothing."""

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
            "gateway": lambda: bench_gateway(bench, out),
            "vllm_router": lambda: bench_vllm_router(bench, out, peers),
            "streams": lambda: bench_streams(bench, out),
            "nginx": lambda: bench_nginx(bench, out),
            "litellm": lambda: bench_litellm(bench, out, peers),
            "memory": lambda: bench_memory(bench, out, memory_requests),
        }
        with bench.upstream():
            out |= {
                "direct_rps": bench.rounds(bench.upstream_port).rps,
                "direct_p50_ms": bench.rounds(bench.upstream_port, connections=1).load["p50_ms"],
            }
            for name, part in parts.items():
                if name in only:
                    part()
        if "swaps" in only:
            with bench.upstream(chunk_ms=20):
                bench_swaps(bench, out)
    for name in ("vllm_router", "litellm"):
        if out.get(f"{name}_rps_per_core") and "capture_rps_per_core" in out:
            out[f"capture_over_{name}"] = out["capture_rps_per_core"] / out[f"{name}_rps_per_core"]
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in out.items()}


def install_peers(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run(
        [str(folder / "bin" / "pip"), "install", "-q", "vllm-router", "litellm[proxy]"], check=True
    )


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
