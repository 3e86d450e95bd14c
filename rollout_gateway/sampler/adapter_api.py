"""Loads and unloads adapters in an inference server by vLLM's API, and probes that an adapter changes its logprobs.

A server may load an adapter and still answer as the base model does, such as if its weights match no layer, so each
adapter is probed before gateways send calls for it: next-token logprobs after a few fixed prompts must differ from the
base version's. `rollout_gateway.sampler.controller` calls these functions."""

from __future__ import annotations

import msgspec

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import Upstream
from rollout_gateway.sampler.adapter_files import AdapterError

logger = get_logger("rollout_gateway.sampler.adapter_api")

_PROMPTS = tuple(tuple(range(first, first + 16)) for first in (3, 35, 67, 99))
"""Prompts of the probe, as token ids. The ids are small, so that every vocabulary has them."""
_TOP_LOGPROBS = 20
"""Number of likeliest next tokens whose logprobs are compared after each prompt; vLLM's default maximum. Prompt
logprobs are not requested, because vLLM 0.32 crashes on such a request if calls to other adapters are in the batch."""


class _TopLogprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _TopLogprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def load(server: Upstream, version: str, path: str) -> None:
    """Make the server load the adapter in the folder `path`.

    Raises `UpstreamError`, and `AdapterError` if the server refuses (`permanent` for a 4xx status)."""
    request = msgspec.json.encode({"lora_name": version, "lora_path": path})
    status, body = await server.fetch("POST", "/v1/load_lora_adapter", request, timeout_s=120)
    if status != 200 and b"already been loaded" not in body:
        text = body[:300].decode(errors="replace")
        raise AdapterError(f"loading it was answered {status}: {text}", permanent=400 <= status < 500)


async def unload(server: Upstream, version: str) -> None:
    """Make the server unload an adapter. Does nothing if the server has not loaded it. Raises `UpstreamError`."""
    request = msgspec.json.encode({"lora_name": version})
    status, body = await server.fetch("POST", "/v1/unload_lora_adapter", request, timeout_s=60)
    if status not in (200, 404):
        text = body[:300].decode(errors="replace")
        logger.warning("adapter not unloaded", version=version, server=server.url, status=status, answer=text)


async def next_logprobs(server: Upstream, model: str) -> list[dict[str, float]]:
    """Return, for each probe prompt, the logprobs of the likeliest next tokens by token. `model`: a name that the
    server serves.

    Raises `AdapterError`, `UpstreamError`."""
    request = {
        "model": model,
        "prompt": _PROMPTS,
        "max_tokens": 1,
        "temperature": 1,
        "logprobs": _TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }
    data = msgspec.json.encode(request)
    status, body = await server.fetch("POST", "/v1/completions", data, timeout_s=120)
    if status != 200:
        raise AdapterError(f"the probe was answered {status}: {body[:300].decode(errors='replace')}", permanent=False)
    choices = sorted(msgspec.json.decode(body, type=_Completion).choices, key=lambda c: c.index)
    return [c.logprobs.top_logprobs[0] for c in choices]


def logprob_difference(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the largest absolute difference between a token's logprobs in `a` and in `b`, over the tokens that are in
    both; 0 if they are equal. If no token is, return the difference between the logprobs of the two likeliest tokens,
    or 1 if these are equal."""
    shared = a.keys() & b.keys()
    if shared:
        return max(abs(a[token] - b[token]) for token in shared)
    return abs(max(a.values()) - max(b.values())) or 1.0
