"""Other proxies for `benchmarks.gateway` to compare with. A proxy that is not installed is skipped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.proxied import Bench, Proxy, free_port


def _installed(peers: Path, name: str) -> Path | None:
    binary = peers / "bin" / name
    if binary.exists():
        return binary
    sys.stderr.write(f"{binary} is not there: skipped\n")
    return None


@contextlib.contextmanager
def nginx(bench: Bench) -> Iterator[Proxy | None]:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        sys.stderr.write("nginx is not installed (apt-get install nginx-light): skipped\n")
        yield None
        return
    port = free_port()
    settings = bench.folder / f"nginx-{port}.conf"
    settings.write_text(
        f"daemon off; worker_processes 1; pid {bench.folder}/nginx-{port}.pid; error_log "
        f"{bench.folder}/nginx-error.log;\n"
        "events { worker_connections 4096; }\n"
        "http { access_log off; keepalive_requests 100000000; client_body_buffer_size 64k;\n"
        f"  upstream up {{ server 127.0.0.1:{bench.upstream_port}; keepalive 256; keepalive_requests 100000000; }}\n"
        f"  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://up; proxy_http_version 1.1;\n"
        '    proxy_set_header Connection ""; } } }\n'
    )
    command = [binary, "-c", str(settings), "-p", str(bench.folder)]
    with bench.process(command, core=0, ready=f"127.0.0.1:{port}") as process:
        yield Proxy("nginx", port, process)


@contextlib.contextmanager
def vllm_router(bench: Bench, peers: Path) -> Iterator[Proxy | None]:
    binary = _installed(peers, "vllm-router")
    if binary is None:
        yield None
        return
    port, metrics = free_port(), free_port()
    command = [
        str(binary), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error",
        "--worker-urls", f"http://127.0.0.1:{bench.upstream_port}", "--prometheus-port", str(metrics),
    ]  # fmt: skip
    with bench.process(command, core=0, ready=f"http://127.0.0.1:{port}/health") as process:
        yield Proxy("vllm_router", port, process)


@contextlib.contextmanager
def litellm(bench: Bench, peers: Path) -> Iterator[Proxy | None]:
    binary = _installed(peers, "litellm")
    if binary is None:
        yield None
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
        yield Proxy("litellm", port, process)


def install_peers(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run(
        [str(folder / "bin" / "pip"), "install", "-q", "vllm-router", "litellm[proxy]"], check=True
    )
