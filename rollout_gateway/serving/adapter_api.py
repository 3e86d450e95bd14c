"""The adapter API of an inference server, and the probe that an adapter changes its logprobs."""

from __future__ import annotations

import time

import msgspec

from pipeline.names import version_name
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.adapter_files import AdapterError
from rollout_gateway.serving.replicas import Replica

log = get_logger("rollout_gateway.serving.adapter_api")

_PROMPTS = tuple(tuple(range(first, first + 16)) for first in (3, 35, 67, 99))
"""Token ids of the probe's prompts: small ones, which every vocabulary has."""
_TOP_LOGPROBS = 20
"""Logprobs compared after each prompt: as many as vLLM gives by default. They are those of the next token, since asking
for a prompt's own logprobs makes vLLM 0.32 crash if calls to other adapters are in the batch."""


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


class _TopLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _TopLogprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def check_health(replica: Replica) -> None:
    """Raises `UpstreamError` if the server is not healthy."""
    await _fetch(replica, "/health")


async def held_adapters(replica: Replica) -> dict[str, str]:
    """The adapters that the server holds: path by version. Raises `UpstreamError`, `msgspec.DecodeError`."""
    cards = msgspec.json.decode(await _fetch(replica, "/v1/models"), type=_ModelCards).data
    return {card.id: card.root or "" for card in cards if card.parent is not None}


async def incarnation(replica: Replica) -> str:
    """The start time of the server's process, from its metrics. Without metrics, the present time."""
    status, body = await replica.upstream.fetch("GET", "/metrics")
    for line in body.splitlines() if status == 200 else ():
        if line.startswith(b"process_start_time_seconds"):
            return line.split()[-1].decode()
    return f"{time.time():.3f}"


async def load(replica: Replica, version: str, path: str) -> None:
    """Have the server load an adapter. Raises `AdapterError`; a 4xx status is taken as lasting."""
    request = msgspec.json.encode({"lora_name": version, "lora_path": path})
    status, body = await replica.upstream.fetch("POST", "/v1/load_lora_adapter", request, timeout_s=120)
    if status != 200 and b"already been loaded" not in body:
        text = body[:300].decode(errors="replace")
        raise AdapterError(f"the server answered {status}: {text}", lasting=400 <= status < 500)


async def unload(replica: Replica, version: str) -> None:
    """Have the server drop an adapter. A server that does not hold it is left alone."""
    request = msgspec.json.encode({"lora_name": version})
    status, body = await replica.upstream.fetch("POST", "/v1/unload_lora_adapter", request, timeout_s=60)
    if status not in (200, 404):
        text = body[:300].decode(errors="replace")
        log.warning("adapter not unloaded", version=version, replica=replica.name, status=status, answer=text)


async def next_logprobs(replica: Replica, model: str) -> list[dict[str, float]]:
    """For each probe prompt, the likeliest next tokens and their logprobs. `model` is the name that the server knows.

    Raises `AdapterError`."""
    request = {
        "model": model,
        "prompt": _PROMPTS,
        "max_tokens": 1,
        "temperature": 1,
        "logprobs": _TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }
    data = msgspec.json.encode(request)
    status, body = await replica.upstream.fetch("POST", "/v1/completions", data, timeout_s=120)
    if status != 200:
        raise AdapterError(
            f"the probe was answered {status}: {body[:300].decode(errors='replace')}", lasting=False
        )
    choices = sorted(msgspec.json.decode(body, type=_Completion).choices, key=lambda c: c.index)
    return [c.logprobs.top_logprobs[0] for c in choices]


class Probe:
    """Measures how much a version's logprobs differ from its base model's. The base model is asked once for each server
    process."""

    def __init__(self) -> None:
        self._base: dict[tuple[str, str, str], list[dict[str, float]]] = {}

    async def delta(self, replica: Replica, model: str, version: str) -> float:
        """The largest difference of a logprob after the probe prompts; 0 if the adapter changes nothing. Raises
        `AdapterError`."""
        key = replica.name, replica.incarnation, model
        if key not in self._base:
            self._base[key] = await next_logprobs(replica, version_name(model, 0))
        here = await next_logprobs(replica, version)
        return max(_difference(a, b) for a, b in zip(self._base[key], here, strict=True))


def _difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Over the tokens that both name. If there are none, of the likeliest token's logprob."""
    shared = a.keys() & b.keys()
    if shared:
        return max(abs(a[token] - b[token]) for token in shared)
    return abs(max(a.values()) - max(b.values())) or 1.0


async def _fetch(replica: Replica, path: str) -> bytes:
    status, body = await replica.upstream.fetch("GET", path)
    if status != 200:
        raise UpstreamError(f"GET {path} was answered {status}", answered=True)
    return body
