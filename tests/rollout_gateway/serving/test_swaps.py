"""Adapter swaps under streams, on real vLLM: no stream fails or waits, every exchange names the version that sampled
it, and no call is answered by an older version than a call that had ended when it began.

    JOURNEYWORK_SWAPS=200 pytest tests/rollout_gateway/serving/test_swaps.py    64 streams, some minutes on two cores

Clients stream one completion after the other while checkpoints are published, each as soon as the one before it
serves. Versions are verified twice: by the `model` that vLLM itself put into each reply, and by the recorded logprobs,
which only the labelled version's weights give again (computed with transformers, one exchange of each version)."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_tensors
from transformers import AutoModelForCausalLM

from pipeline.events import ExchangeRecorded, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.rollout_gateway.conftest import StartGateway, publish_adapter, published_files
from tests.rollout_gateway.kit import exchanges, older_than_before, serves

SWAPS = int(os.environ.get("JOURNEYWORK_SWAPS", "8"))
STREAMS = 16 if SWAPS < 100 else 64
TOKENS = 24
"""Length of every streamed reply."""
LORA_SCALE = 16 / 8

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300 + 10 * SWAPS)]


@dataclass(eq=False)
class Streams:
    """What the clients saw."""

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
                    async with session.post(f"/t/{trajectory}/v1/chat/completions", json=body) as answer:
                        answer.raise_for_status()
                        await self._read_reply(answer.content)
        except aiohttp.ClientError as error:
            self.failures.append(repr(error))

    async def _read_reply(self, lines: aiohttp.StreamReader) -> None:
        models, name, done = set[str](), "", False
        async for line in lines:
            event = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or event == b"[DONE]":
                done |= event == b"[DONE]"
                continue
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

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` returns true; fail if a call fails meanwhile."""
        with anyio.fail_after(90):
            while not condition():
                assert self.failures == []
                await anyio.sleep(0.05)


class Weights:
    """The base model with any version's adapter merged into it."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(VllmServer.base, dtype=torch.float32)
        self._base = {name: value.clone() for name, value in self._model.state_dict().items()}

    @torch.inference_mode()
    def difference(self, event: ExchangeRecorded, step: int) -> float:
        """The largest difference of an exchange's logprobs from those of version `step`."""
        state = self._model.state_dict()
        tensors = load_tensors(published_files(step)["adapter_model.safetensors"])
        for name, base in self._base.items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{key}.lora_A.weight" in tensors:
                a, b = (torch.from_numpy(tensors[f"{key}.lora_{x}.weight"].copy()) for x in "AB")
                state[name].copy_(base + LORA_SCALE * (b @ a))
        prompt, sampled = unpack_ids(event.prompt_ids), unpack_ids(event.sampled_ids)
        ids = torch.tensor([*prompt.tolist(), *sampled.tolist()])
        logits = self._model(ids[None, :-1]).logits[0, len(prompt) - 1 :]
        of_sampled: Any = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0]
        return float(np.abs(np.asarray(of_sampled) - unpack_logprobs(event.logprobs)).max())


async def test_swaps_under_streams(start_gateway: StartGateway, broker: Broker) -> None:
    """Versions come one right after the other, and each slot of the server is used several times."""
    gateway, seen = start_gateway(max_loras=3), Streams()
    await serves(gateway, await publish_adapter(broker, 1))
    for number in range(STREAMS):
        gateway.open(id=f"swap-{number}")
    async with anyio.create_task_group() as clients:
        for number in range(STREAMS):
            clients.start_soon(seen.client, gateway.url, f"swap-{number}", number)
        await seen.until(lambda: len(seen.replies) >= STREAMS)
        for step in range(2, SWAPS + 2):
            await serves(gateway, await publish_adapter(broker, step))
            # A version counts as swapped in once it answered a call.
            await seen.until(lambda version=f"tictactoe@{step}": version in seen.begun)  # type: ignore[misc]
        seen.stopping = True
    assert seen.failures == []
    # A new version does not wait until the streams of the old one have ended.
    assert seen.beside
    recorded = [e for number in range(STREAMS) for e in await exchanges(broker, f"swap-{number}")]
    assert {e.status for e in recorded} == {"complete"}
    assert older_than_before([(e.started_at, e.at, e.step) for e in recorded]) == []
    assert {json.loads(e.response)["id"]: {e.policy_version} for e in recorded} == seen.replies
    of_version = {e.step: e for e in recorded}
    assert len(of_version) == SWAPS + 1
    weights = Weights()
    for step, event in of_version.items():
        assert weights.difference(event, step) < 1e-3 < weights.difference(event, step + 1)
