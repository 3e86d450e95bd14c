"""Benchmark of HTTP libraries for the gateway: each pair of a server and a client as a proxy with the work of capture.

A proxy reads a call, sends it on with the exact version, and reads the answer with the gateway's own functions; it
records nothing. The gateway itself is measured in the same run, by calls that wait for the log (`capture`) and by calls
that name no trajectory (`plain`), as are calls to the bare server. `calls` and `chunks` are those per second of the
proxy's own CPU time, so a client that can't keep it busy does not flatter or punish it. Bodies are 2 KB. All are run
five times, in turn, and the best run of each counts. A pair whose libraries are not installed is left out.

    python -m benchmarks.http_pairs --seconds 2
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import PATH, RESULTS, Bench, Target, machine, write_results
from rollout_gateway.dialects.calls import Call
from rollout_gateway.dialects.endpoints import read_answer, read_chat, upstream_body
from rollout_gateway.dialects.streaming import DONE, StreamCapture
from tests.conftest import free_port
from tests.kits.services import running

FLAGS = {
    "uvicorn": "--http httptools --loop uvloop --ws none --lifespan off --no-access-log --no-proxy-headers",
    "granian": "--interface rsgi --loop uvloop --no-ws --log-level warning",
}
CLIENTS = ("aiohttp", "pyreqwest")
CONNECTIONS, STREAMS = 32, 200
JSON, EVENTS = ("content-type", "application/json"), ("content-type", "text/event-stream")
_clients: list[Any] = []
"""The client of this proxy, made in its event loop by the first call."""


async def aiohttp_post(url: str, body: bytes) -> AsyncIterator[bytes]:
    """Post a request with aiohttp, and yield the parts of the answer."""
    import aiohttp

    if not _clients:
        connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
        _clients.append(aiohttp.ClientSession(connector=connector, cookie_jar=jar))
    async with _clients[0].post(url, data=body, headers=[JSON]) as reply:
        async for chunk in reply.content.iter_any():
            yield chunk


async def pyreqwest_post(url: str, body: bytes) -> AsyncIterator[bytes]:
    """Post a request with pyreqwest, and yield the parts of the answer."""
    from pyreqwest.client import ClientBuilder  # type: ignore[import-not-found,unused-ignore]

    if not _clients:
        _clients.append(ClientBuilder().build())
    request = _clients[0].post(url).header(*JSON).body_bytes(body).streamed_read_buffer_limit(0)
    async with request.build_streamed() as reply:
        while (chunk := await reply.body_reader.read_chunk()) is not None:
            yield bytes(chunk)


async def relay(call: Call) -> AsyncIterator[bytes]:
    """Yield the parts of a call's answer, whatever the server and the client are."""
    post = {"aiohttp": aiohttp_post, "pyreqwest": pyreqwest_post}[os.environ["PAIR_CLIENT"]]
    reply = post(os.environ["PAIR_UPSTREAM"], upstream_body(call, "policy@0", answer_id="pair"))
    if not call.stream:
        yield read_answer(b"".join([chunk async for chunk in reply]), call).client_body()
        return
    capture = StreamCapture(call)
    async for chunk in reply:
        if seen := capture.feed(chunk):
            yield seen
    capture.answer()
    yield capture.last_events + DONE


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """The proxy as an ASGI application, for uvicorn."""
    call = read_chat((await receive())["body"])  # 2 KB come at once
    kind = [tuple(part.encode() for part in (EVENTS if call.stream else JSON))]
    await send({"type": "http.response.start", "status": 200, "headers": kind})
    async for part in relay(call):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def rsgi(scope: Any, protocol: Any) -> None:
    """The proxy as an RSGI application, for granian."""
    call = read_chat(await protocol())
    if not call.stream:
        protocol.response_bytes(200, [JSON], b"".join([part async for part in relay(call)]))
        return
    stream = protocol.response_stream(200, [EVENTS])
    async for part in relay(call):
        await stream.send_bytes(part)


@contextlib.contextmanager
def proxy(bench: Bench, server: str, client: str) -> Iterator[Target]:
    """Run one pair within the block, on the gateway's core."""
    port = free_port()
    os.environ |= {"PAIR_CLIENT": client, "PAIR_UPSTREAM": f"http://127.0.0.1:{bench.upstream_port}{PATH}"}
    name = f"benchmarks.http_pairs:{'asgi' if server == 'uvicorn' else 'rsgi'}"
    command = ("sh", "-c", f"echo starting; exec {sys.executable} -m {server} {FLAGS[server]} --port {port} {name}")
    with running(*command, log=bench.folder / f"{server}-{client}.log", core=0, stdout=True) as (process, _):
        data = bench.bodies[False].read_bytes()
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{PATH}", data):
                break
            time.sleep(0.1)
        yield Target(f"{server}_{client}", port, process)


def measure(bench: Bench, seconds: float) -> dict[str, Any]:
    """Return the figures of each pair and of the gateway, from runs of so many seconds."""
    present = {name for name in (*FLAGS, *CLIENTS) if importlib.util.find_spec(name)}
    out: dict[str, Any] = {"left_out": sorted({*FLAGS, *CLIENTS} - present)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(bench.upstream())
        capture = stack.enter_context(bench.gateway(STREAMS))
        plain = dataclasses.replace(capture, name="plain", path=PATH)
        targets = [Target("direct", bench.upstream_port), plain, capture]
        pairs = [(s, c) for s in FLAGS for c in CLIENTS if {s, c} <= present]
        targets += [stack.enter_context(proxy(bench, *pair)) for pair in pairs]
        for name, runs in bench.race(targets, CONNECTIONS, seconds).items():
            out[name] = {"calls": max(run["calls"] for run in runs)}
        for name, runs in bench.race(targets, 1, seconds).items():
            out[name]["p50_ms"] = min(run["p50_ms"] for run in runs)
        for target in targets[2:]:
            try:
                (runs,) = bench.race([target], STREAMS, max(seconds, 4), stream=True).values()
                out[target.name]["chunks"] = max(run["streamed"] for run in runs)
            except RuntimeError as error:  # a pair that fails is no choice, and the others still are
                out[target.name]["chunks"] = str(error)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure HTTP libraries for the gateway.")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each run")
    parser.add_argument("--out", type=Path, default=RESULTS / "http_pairs.json")
    args = parser.parse_args()
    figures = machine()
    with tempfile.TemporaryDirectory(prefix="bench-pairs-") as folder:
        write_results(args.out, figures | measure(Bench(Path(folder)), args.seconds))


if __name__ == "__main__":
    main()
