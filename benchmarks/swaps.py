"""Adapter swaps under load, on real vLLM: do streams fail or stall, and does every exchange name the policy version
that sampled it?

    python -m benchmarks.swaps                               200 swaps under 64 streams, about five minutes on two cores
    python -m benchmarks.swaps --swaps 60 --streams 12 --gateways 2 --servers 3

Clients stream one completion after the other while checkpoints are published, each as soon as the one before it
serves. Times without swaps and with them take turns. Everything runs on this machine: vLLM (CPU build) with the
demo's model, each server with a sampler agent and a folder of its own, NATS, the gateways and the clients. The ratio
of the gaps is the result, because the gaps are vLLM's own more than the gateway's. Of several servers the last joins
after a third of the swaps, and the first leaves after two thirds. Policy versions are verified twice: by the `model`
that vLLM itself put into each reply, and by the recorded logprobs, which only the labelled version's weights give
again (computed with transformers, one exchange of each version). Results go to benchmarks/results/swaps.json, of
several servers only to standard output."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from transformers import AutoModelForCausalLM

from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig, with_values
from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import NatsServer, VllmServer, free_port
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, adapter_tensors, publish_adapter

RESULTS = Path(__file__).parent / "results" / "swaps.json"
TOKENS = 24
"""Length of every streamed reply."""
ROUNDS = 10
"""Calm and swaps take turns, so that what else the machine does falls on both."""
SETTLE_S = 2.5
"""Seconds after a round of swaps until all streams come from the newest version again."""
LORA_SCALE = 16 / 8
_PATIENCE_S = 90.0


@dataclass(eq=False)
class Streams:
    """The clients' measurements."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) between a chunk and the one before it in the same stream."""
    first: list[tuple[float, float]] = field(default_factory=list)
    """(when, seconds) from a request to its first chunk."""
    replies: dict[str, set[str]] = field(default_factory=dict)
    """Id of a complete reply to the `model` of its chunks, which is vLLM's own."""
    failures: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)
    """Versions in the first chunk of some reply."""
    newest: int = 0
    """The newest step among them."""
    beside: set[str] = field(default_factory=set)
    """Versions whose streams went on after a reply of a newer version had begun."""
    stopping: bool = False

    async def client(self, url: str, trajectory: str, number: int) -> None:
        """Ask for one stream after the other on one connection, until `stopping`."""
        body = {
            "model": "tictactoe", "stream": True, "max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"a1=x b2=o {number % 9}"}],
        }  # fmt: skip
        parts = httpx.URL(url)
        reader, writer = await asyncio.open_connection(parts.host, parts.port)
        data = json.dumps(body).encode()
        head = (
            f"POST /t/{trajectory}/v1/chat/completions HTTP/1.1\r\nHost: {parts.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        try:
            while not self.stopping:
                writer.write(head.encode() + data)
                await self._read_reply(reader, time.perf_counter())
        except (OSError, asyncio.IncompleteReadError) as error:
            self.failures.append(f"connection: {error!r}")
        finally:
            writer.close()

    async def _read_reply(self, reader: asyncio.StreamReader, asked: float) -> None:
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            self.failures.append(answer.decode())
            raise ConnectionResetError(answer.split(b"\r\n", 1)[0].decode())
        before, models, name, done, step = asked, set(), "", False, 0
        async for event in _events(reader):
            now = time.perf_counter()
            if event == b"[DONE]":
                done = True
                continue
            (self.first if before is asked else self.gaps).append((now, now - before))
            before = now
            chunk = json.loads(event)
            if "error" in chunk:
                self.failures.append(event.decode())
                continue
            model = chunk["model"]
            if model not in models:
                models.add(model)
                self.begun.add(model)
                step = int(model.rpartition("@")[2])
                self.newest = max(self.newest, step)
            if step < self.newest:
                self.beside.add(model)
            name = chunk["id"]
        if not done:
            self.failures.append(f"{name} ended without its end")
        self.replies[name] = models


async def _events(reader: asyncio.StreamReader) -> Any:
    """Yield the payload of each event of a chunked reply as soon as it is complete."""
    buffer = b""
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        buffer += data[:-2]
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            yield event.removeprefix(b"data: ")


Spans = list[tuple[float, float]]


async def _span(work: Awaitable[None]) -> tuple[float, float]:
    """Run `work` and return the times at which it began and ended."""
    start = time.perf_counter()
    await work
    return start, time.perf_counter()


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _quantile(values: Spans, share: float, spans: Spans) -> float:
    """A quantile in milliseconds of the values measured within `spans`."""
    within = [seconds for when, seconds in values if any(start <= when < end for start, end in spans)]
    return float(np.quantile(within, share)) * 1000


async def measure(
    gateways: Sequence[GatewayProcess],
    broker: Broker,
    *,
    swaps: int,
    streams: int,
    calm_s: float,
    before_swap: Callable[[int, Streams], Awaitable[None]] | None = None,
) -> tuple[dict[str, Any], Streams]:
    """Return what clients measured without and with swaps. Leaves `streams` trajectories `swap-<n>` open.

    `before_swap` is awaited before each version but the first, with its step. Raises `RuntimeError` if a call fails
    or a version is not served by every gateway."""
    seen = Streams()
    took: list[float] = []

    async def swap(steps: range) -> None:
        for step in steps:
            if before_swap is not None:
                await before_swap(step, seen)
            took.append(await _publish(gateways, broker, step))
            # A version counts as swapped in once it answered a call.
            await until(lambda version=f"tictactoe@{step}": version in seen.begun, seen)

    await _publish(gateways, broker, 1)
    for number in range(streams):
        gateways[number % len(gateways)].open(id=f"swap-{number}")
    clients = [
        asyncio.ensure_future(seen.client(gateways[n % len(gateways)].url, f"swap-{n}", n))
        for n in range(streams)
    ]
    try:
        await until(lambda: len(seen.replies) >= streams, seen)
        calm, swapped = [], []
        for first in range(2, swaps + 2, -(-swaps // ROUNDS)):
            calm.append(await _span(asyncio.sleep(calm_s / ROUNDS)))
            swapped.append(await _span(swap(range(first, min(first - (-swaps // ROUNDS), swaps + 2)))))
            await asyncio.sleep(SETTLE_S)
    finally:
        seen.stopping = True
        await asyncio.gather(*clients)
    out: dict[str, Any] = {
        "swaps": swaps, "streams": streams, "requests": len(seen.replies), "failures": len(seen.failures),
        "calm_s": _length(calm), "swap_s": _length(swapped),
        "publish_to_serving_p50_s": float(np.median(took)), "publish_to_serving_max_s": max(took),
    }  # fmt: skip
    for name, values in (("gap", seen.gaps), ("first_chunk", seen.first)):
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            out[f"calm_{name}_{label}_ms"] = _quantile(values, share, calm)
            out[f"swap_{name}_{label}_ms"] = _quantile(values, share, swapped)
    out["swap_p99_gap_ratio"] = out["swap_gap_p99_ms"] / out["calm_gap_p99_ms"]
    return out, seen


async def _publish(gateways: Sequence[GatewayProcess], broker: Broker, step: int) -> float:
    """Publish a version. Return the seconds until every gateway serves it."""
    started = time.perf_counter()
    version = await publish_adapter(broker, step)
    async with httpx.AsyncClient(timeout=60) as client:
        for gateway in gateways:
            while (await client.get(f"{gateway.url}/v1/policies")).json()["data"][0]["version"] != version:
                if time.perf_counter() > started + _PATIENCE_S:
                    raise RuntimeError(f"{version} did not serve within {_PATIENCE_S:.0f} s")
                await asyncio.sleep(0.25)  # a request more often would slow down what is measured
    return time.perf_counter() - started


async def until(condition: Callable[[], bool], seen: Streams) -> None:
    """Wait until `condition` returns true. Raises `RuntimeError` if a call fails meanwhile, or after 90 seconds."""
    deadline = time.perf_counter() + _PATIENCE_S
    while not condition():
        if seen.failures or time.perf_counter() > deadline:
            raise RuntimeError(f"the streams do not go on: {seen.failures[:3]}")
        await asyncio.sleep(0.05)


async def check_labels(broker: Broker, seen: Streams, streams: int) -> dict[str, Any]:
    """Compare the recorded versions with the model names of vLLM's replies and with float32 logprobs."""
    recorded: dict[str, ExchangeRecorded] = {}
    for number in range(streams):
        for r in await broker.read(ExchangeRecorded, project=PROJECT, trajectory=f"swap-{number}"):
            recorded[json.loads(r.event.response)["id"]] = r.event
    wrong = [
        name
        for name, models in seen.replies.items()
        if name not in recorded or models != {recorded[name].policy_version}
    ]
    exchange_of_version = {e.policy_version: e for e in recorded.values()}
    model = Weights()
    own, other = [], []
    for version, event in sorted(exchange_of_version.items(), key=lambda kv: kv[1].step):
        said = unpack_logprobs(event.logprobs)
        own.append(float(np.abs(model.logprobs(event, event.step) - said).max()))
        other.append(float(np.abs(model.logprobs(event, event.step + 1) - said).max()))
        if own[-1] > 1e-3:
            wrong.append(version)
    return {
        "exchanges": len(recorded), "versions": len(exchange_of_version), "mislabelled": len(wrong),
        "logprob_diff_own_max": max(own), "logprob_diff_next_version_min": min(other),
    }  # fmt: skip


class Weights:
    """The base model with any version's adapter merged into it."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(VllmServer.base, dtype=torch.float32)
        self._base = {name: value.clone() for name, value in self._model.state_dict().items()}

    @torch.inference_mode()
    def logprobs(self, event: ExchangeRecorded, step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Logprobs of an exchange's sampled tokens under version `step`."""
        state = self._model.state_dict()
        tensors = load_tensors(adapter_tensors(step))
        for name, base in self._base.items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                a, b = (torch.from_numpy(tensors[f"{key}.lora_{x}.weight"].copy()) for x in "AB")
                state[name].copy_(base + LORA_SCALE * (b @ a))
        prompt, sampled = unpack_ids(event.prompt_ids), unpack_ids(event.sampled_ids)
        ids = torch.tensor([*prompt.tolist(), *sampled.tolist()])
        logits = self._model(ids[None, :-1]).logits[0, len(prompt) - 1 :]
        of_sampled = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])
        return np.asarray(of_sampled[:, 0])


class SamplerProcess(GatewayProcess):
    """`python -m rollout_gateway.sampler` beside one server."""

    module = "rollout_gateway.sampler"

    @property
    def url(self) -> str:
        return self.config.vllm.urls[0]


@dataclass
class Fleet:
    """The running processes."""

    gateways: list[GatewayProcess]
    servers: list[VllmServer]
    agents: list[SamplerProcess]
    nats: NatsConfig

    async def change(self, step: int, seen: Streams, *, swaps: int, streams: int) -> None:
        """Let the last server join after a third of the swaps, and the first one leave after two thirds."""
        if step == 2 + swaps // 3:
            await asyncio.to_thread(self.agents[-1].start)
        if step == 2 + 2 * swaps // 3:
            await asyncio.to_thread(self.agents[0].stop)
            replies = len(seen.replies) + 2 * streams  # every client has ended what it was reading
            await until(lambda: len(seen.replies) >= replies, seen)
            await asyncio.to_thread(self.servers[0].stop)


@contextlib.contextmanager
def fleet(folder: Path, gateways: int, servers: int) -> Iterator[Fleet]:
    """Start NATS, the servers, the gateways and the agents, of several agents all but the last. Print the ends of the
    logs if the block fails, because the folder is deleted afterwards."""
    with contextlib.ExitStack() as stack:
        nats = NatsServer(folder)
        nats.start()
        stack.callback(nats.stop)
        started = []
        for number in range(servers):
            (folder / f"server-{number}").mkdir()
            started.append(VllmServer(folder / f"server-{number}"))
            stack.callback(started[-1].stop)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(420), started))
        base = Config(
            project=PROJECT,
            nats=NatsConfig(url=nats.url),
            # One slot of a server stays empty: see docs/operations.md.
            vllm=VllmConfig(urls=tuple(s.url for s in started), max_loras=3),
            models=(ModelConfig(name="tictactoe", base=str(VllmServer.base)),),
            gateway=GatewayConfig(key_secret_env="JOURNEYWORK_KEY_SECRET"),
        )
        os.environ["JOURNEYWORK_KEY_SECRET"] = "the same at every gateway"
        fronts = [
            GatewayProcess(
                with_values(base, {"run_dir": str(folder / f"gateway-{n}"), "gateway.port": free_port()})
            )
            for n in range(gateways)
        ]
        agents = [
            SamplerProcess(
                with_values(base, {"run_dir": str(folder / f"agent-{n}"), "vllm.urls": (server.url,)})
            )
            for n, server in enumerate(started)
        ]
        for process in (*fronts, *agents):
            stack.callback(process.stop)
            if process is not agents[-1] or servers == 1:
                process.start()
        try:
            yield Fleet(fronts, started, agents, base.nats)
        except BaseException:
            for process in (*fronts, *agents):
                if (process.folder / "gateway.log").exists():
                    sys.stderr.write(f"{process.folder.name}: {process.log[-4000:]}\n")
            raise


async def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    with fleet(folder, options.gateways, options.servers) as running:
        change = (
            partial(running.change, swaps=options.swaps, streams=options.streams)
            if options.servers > 1
            else None
        )
        async with Broker.connect(running.nats) as broker:
            out, seen = await measure(
                running.gateways, broker, swaps=options.swaps, streams=options.streams, calm_s=options.calm_s,
                before_swap=change,
            )  # fmt: skip
            return out | await check_labels(broker, seen, options.streams)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swaps", description=__doc__)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--calm-s", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = asyncio.run(run(Path(folder), args))
    out = {"cpus": os.cpu_count(), "python": platform.python_version(), **out}
    if args.servers == 1:
        RESULTS.write_text(json.dumps(out, indent=2) + "\n")
    print(json.dumps(out, indent=2))
    if out["failures"] or out["mislabelled"]:
        raise SystemExit("calls failed or were mislabelled")


if __name__ == "__main__":
    main()
