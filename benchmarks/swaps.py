"""Adapter swaps under load, on real vLLM: do streams fail or stall, and does every exchange name the policy version
that sampled it?

    python -m benchmarks.swaps               200 swaps under 64 streams, about five minutes on two cores

Clients stream one completion after the other while checkpoints are published, each as soon as the one before it
serves. Times without swaps and with them take turns. Everything runs on this machine: vLLM (CPU build) with the
demo's model, NATS, a gateway, a sampler agent and the clients. The ratio of the gaps is the result, because the gaps
are vLLM's own more than the gateway's. Policy versions are verified twice: by the `model` that vLLM itself put into
each reply, and by the recorded logprobs, which only the labelled version's weights give again (computed with
transformers, one exchange of each version)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from transformers import AutoModelForCausalLM

from benchmarks.bench import RESULTS, machine, nats_server, write_results
from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, VllmConfig
from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import VllmServer, free_port
from tests.kits.services import service
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, adapter_tensors, publish_adapter

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
            "model": "tictactoe",
            "stream": True,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": f"a1=x b2=o {number % 9}"}],
        }
        try:
            async with aiohttp.ClientSession(url) as session:
                while not self.stopping:
                    asked = time.perf_counter()
                    async with session.post(f"/t/{trajectory}/v1/chat/completions", json=body) as answer:
                        answer.raise_for_status()
                        await self._read_reply(answer.content, asked)
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))

    async def _read_reply(self, lines: aiohttp.StreamReader, asked: float) -> None:
        before, models, name, done = asked, set(), "", False
        async for line in lines:
            if not line.startswith(b"data: "):
                continue
            event, now = line.removeprefix(b"data: ").strip(), time.perf_counter()
            if event == b"[DONE]":
                done = True
                continue
            (self.first if before is asked else self.gaps).append((now, now - before))
            before = now
            chunk = json.loads(event)
            if "error" in chunk:
                self.failures.append(event.decode())
                continue
            model, name = chunk["model"], chunk["id"]
            step = int(model.rpartition("@")[2])
            if model not in models:
                models.add(model)
                self.begun.add(model)
                self.newest = max(self.newest, step)
            if step < self.newest:
                self.beside.add(model)
        if not done:
            self.failures.append(f"{name} ended without its end")
        self.replies[name] = models


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
    gateway: GatewayProcess, broker: Broker, *, swaps: int, streams: int, calm_s: float
) -> tuple[dict[str, Any], Streams]:
    """Return what clients measured without and with swaps. Leaves `streams` trajectories `swap-<n>` open.

    Raises `RuntimeError` if a call fails or a version is not served."""
    seen = Streams()
    took: list[float] = []

    async def swap(steps: range) -> None:
        for step in steps:
            took.append(await _publish(gateway, broker, step))
            # A version counts as swapped in once it answered a call.
            await until(lambda version=f"tictactoe@{step}": version in seen.begun, seen)

    await _publish(gateway, broker, 1)
    for number in range(streams):
        gateway.open(id=f"swap-{number}")
    clients = [asyncio.ensure_future(seen.client(gateway.url, f"swap-{n}", n)) for n in range(streams)]
    try:
        await until(lambda: len(seen.replies) >= streams, seen)
        calm, swapped = [], []
        for first in range(2, swaps + 2, -(-swaps // ROUNDS)):
            calm.append(await _span(_calm(seen, calm_s / ROUNDS)))
            swapped.append(await _span(swap(range(first, min(first - (-swaps // ROUNDS), swaps + 2)))))
            await asyncio.sleep(SETTLE_S)
    finally:
        seen.stopping = True
        await asyncio.gather(*clients)
    out: dict[str, Any] = {
        "swaps": swaps,
        "streams": streams,
        "requests": len(seen.replies),
        "failures": len(seen.failures),
        "calm_s": _length(calm),
        "swap_s": _length(swapped),
        "publish_to_serving_p50_s": float(np.median(took)),
        "publish_to_serving_max_s": max(took),
    }
    for name, values in (("gap", seen.gaps), ("first_chunk", seen.first)):
        for share, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            out[f"calm_{name}_{label}_ms"] = _quantile(values, share, calm)
            out[f"swap_{name}_{label}_ms"] = _quantile(values, share, swapped)
    out["swap_p99_gap_ratio"] = out["swap_gap_p99_ms"] / out["calm_gap_p99_ms"]
    return out, seen


async def _calm(seen: Streams, seconds: float) -> None:
    """Wait for so long, and until a reply has begun and a stream has gone on, however slow the server is."""
    first, gaps = len(seen.first), len(seen.gaps)
    await asyncio.sleep(seconds)
    await until(lambda: len(seen.first) > first and len(seen.gaps) > gaps, seen)


async def _publish(gateway: GatewayProcess, broker: Broker, step: int) -> float:
    """Publish a version. Return the seconds until the gateway serves it."""
    started = time.perf_counter()
    version = await publish_adapter(broker, step)
    async with httpx.AsyncClient(timeout=60) as client:
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
        "exchanges": len(recorded),
        "versions": len(exchange_of_version),
        "mislabelled": len(wrong),
        "logprob_diff_own_max": max(own),
        "logprob_diff_next_version_min": min(other),
    }


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


async def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        nats = NatsConfig(url=stack.enter_context(nats_server(folder / "nats")).url)
        vllm = VllmServer(folder)
        stack.callback(vllm.stop)
        vllm.start(420)
        config = Config(
            project=PROJECT,
            run_dir=str(folder / "gateway"),
            nats=nats,
            # One slot of a server stays empty: see docs/decisions/gateway.md.
            vllm=VllmConfig(urls=(vllm.url,), max_loras=3),
            models=(ModelConfig(name="tictactoe", base=str(VllmServer.base)),),
            gateway=GatewayConfig(port=free_port()),
        )
        stack.enter_context(service("rollout_gateway", config))
        stack.enter_context(service("rollout_gateway.sampler", config.replace(run_dir=str(folder / "sampler"))))
        async with Broker.connect(nats) as broker:
            out, seen = await measure(
                GatewayProcess(config), broker, swaps=options.swaps, streams=options.streams, calm_s=options.calm_s
            )
            return out | await check_labels(broker, seen, options.streams)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swaps", description=__doc__)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--calm-s", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = asyncio.run(run(Path(folder), args))
    write_results(RESULTS / "swaps.json", machine() | out)
    if out["failures"] or out["mislabelled"]:
        raise SystemExit("calls failed or were mislabelled")


if __name__ == "__main__":
    main()
