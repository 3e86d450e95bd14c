"""Token counts: requests that sample nothing and so record nothing. vLLM answers them at `/tokenize`; the gateway
resolves the model's name to a version first. All functions raise `ApiError`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_gateway.api.gateway import ControlRequest, RawAnswer
from rollout_gateway.dialects.calls import Call, Fields, RequestParams, read_fields
from rollout_gateway.dialects.messages import MessagesTranslation, error_body
from rollout_gateway.http.errors import ApiError, bad_answer, invalid_body
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.replicas import least_loaded

_REPLICA_WAIT_S = 60.0
"""Seconds that a request waits for an inference server that serves the model."""
_TIMEOUT_S = 30.0
"""Seconds that the server may take to answer."""


async def tokenize(request: ControlRequest) -> RawAnswer:
    """`POST /tokenize`: the tokens of a prompt, as vLLM answers."""
    fields, params = read_fields(request.http.body, RequestParams)
    request.gateway.permitted.check(fields)
    return await _tokenize(request, params.model, fields)


async def count_tokens(request: ControlRequest) -> RawAnswer:
    """`POST /v1/messages/count_tokens`: the number of tokens of a prompt, tools included, in Anthropic's format. For an
    outside model, its provider counts."""
    if (outside := request.gateway.relay.read(MessagesTranslation.path, request.http.body)) is not None:
        request.access.check_model(outside.params.model)
        return RawAnswer(*await request.gateway.relay.pass_on(request.http, outside, "/count_tokens"))
    translation = MessagesTranslation(request.http.body)
    answer = await _tokenize_call(request, translation.call())
    if answer.status == 400 and translation.merge_system():
        answer = await _tokenize_call(request, translation.call())
    if answer.status != 200:
        return RawAnswer(answer.status, error_body(MessagesTranslation.path, answer.body, answer.status))
    return RawAnswer(200, msgspec.json.encode({"input_tokens": _read_tokens(answer.body).count}))


async def _tokenize_call(request: ControlRequest, call: Call) -> RawAnswer:
    """Return vLLM's answer at `/tokenize` about the prompt of a chat completion."""
    request.gateway.permitted.check(call.fields)
    prompt: Fields = {name: call.fields[name] for name in ("messages", "tools") if name in call.fields}
    return await _tokenize(request, call.params.model, prompt)


async def token_ids(request: ControlRequest, model: str, prompt: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt, by the inference server's chat template. `prompt`: the fields of a request to
    vLLM's `/tokenize`, without the model. Raises an `ApiError`: 400 with the server's words for a prompt that it
    refuses, 502 or 503 if no server answers."""
    answer = await _tokenize(request, model, prompt)
    if answer.status != 200:
        text = answer.body.decode(errors="replace")
        raise invalid_body(f"The inference server refuses the prompt: {text}", "messages")
    return _read_tokens(answer.body).tokens


class _Tokens(msgspec.Struct):
    count: int
    tokens: list[int]


def _read_tokens(body: bytes) -> _Tokens:
    """Decode vLLM's answer to `/tokenize`. Raises a 502 `ApiError` if it is none."""
    try:
        return msgspec.json.decode(body, type=_Tokens)
    except msgspec.DecodeError as error:
        raise bad_answer("/tokenize", error) from error


async def _tokenize(request: ControlRequest, model: str, fields: Mapping[str, Any]) -> RawAnswer:
    """Ask the least loaded server that serves `model`. Returns its answer as it is, errors included. Raises a 503
    `ApiError` if there is no server, and a 502 one if it does not answer."""
    gateway = request.gateway
    router, deadline = gateway.router, time.monotonic() + _REPLICA_WAIT_S
    request.access.check_model(router.name(model))
    lease = await gateway.fleet.acquire(lambda: router.resolve(model, None), least_loaded, deadline)
    try:
        body = msgspec.json.encode({**fields, "model": lease.version})
        return RawAnswer(*await lease.replica.upstream.fetch("POST", "/tokenize", body, timeout_s=_TIMEOUT_S))
    except UpstreamError as error:
        lease.replica.suspect()
        message = f"The inference server did not answer: {error}"
        raise ApiError(502, "bad_upstream", message) from error
    finally:
        lease.release()
