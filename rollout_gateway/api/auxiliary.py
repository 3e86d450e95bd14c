"""Requests that sample nothing and so record nothing: token counts, the server's version, a recorded response again.

vLLM answers them; the gateway only resolves the model's name to a version first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest, RawAnswer
from rollout_gateway.api.schemas import DetokenizeBody
from rollout_gateway.capture.identity import Identity
from rollout_gateway.dialects.calls import RequestParams, read_fields
from rollout_gateway.dialects.messages import MessagesTranslation, messages_error
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.dialects.responses import ResponsesTranslation, completion_of
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError, bad_answer
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.replicas import Fleet, least_loaded
from rollout_gateway.serving.routing import VersionRouter

_encode = msgspec.json.Encoder().encode
_WAIT_S = 60.0
_ANSWER_S = 30.0


class _OptionalModel(RequestParams, kw_only=True):
    model: str = ""


class _Count(msgspec.Struct):
    count: int


@dataclass(eq=False)
class AuxiliaryRoutes:
    """Handlers of these routes. All raise `ApiError`."""

    _fleet: Fleet
    _router: VersionRouter
    _identity: Identity
    _permitted: Permitted

    async def version(self, request: ControlRequest) -> RawAnswer:
        return await self._forward(Access(), "GET", "/version")

    async def tokenize(self, request: ControlRequest) -> RawAnswer:
        return await self._forward_body(request)

    async def detokenize(self, request: ControlRequest) -> RawAnswer:
        read_body(request.http.body, DetokenizeBody)
        return await self._forward_body(request)

    async def count_tokens(self, request: ControlRequest) -> RawAnswer:
        """The tokens of a message's prompt, tools included, in Anthropic's format."""
        call = MessagesTranslation(request.http.body).call()
        self._permitted.check(call.fields)
        fields: dict[str, Any] = {
            name: call.fields[name] for name in ("messages", "tools") if name in call.fields
        }
        answer = await self._forward(request.access, "POST", "/tokenize", call.params.model, fields)
        if answer.status != 200:
            return RawAnswer(answer.status, messages_error(answer.body, answer.status))
        try:
            count = msgspec.json.decode(answer.body, type=_Count).count
        except msgspec.DecodeError as error:
            raise bad_answer("/tokenize", error) from error
        return RawAnswer(200, _encode({"input_tokens": count}))

    async def response(self, request: ControlRequest) -> dict[str, Any]:
        """A recorded response of the trajectory that the caller names."""
        name, http = request.values[0], request.http
        trajectory = await self._identity.trajectory_to_read(request.access, request.trajectory, http.headers)
        completion = completion_of(name)
        exchange = None
        if trajectory is not None and completion:
            exchange = await trajectory.exchange_of(completion)
        if exchange is None or exchange.endpoint != ResponsesTranslation.path:
            raise ApiError(
                404,
                "response_not_found",
                f"The log holds no response {name!r} of this trajectory. Name its trajectory by key, URL or header.",
                param="response_id",
            )
        return ResponsesTranslation.recorded(name, exchange)

    async def _forward_body(self, request: ControlRequest) -> RawAnswer:
        fields, params = read_fields(request.http.body, _OptionalModel)
        self._permitted.check(fields)
        return await self._forward(request.access, "POST", request.route.path, params.model, fields)

    async def _forward(
        self, access: Access, method: str, path: str, model: str = "", fields: Mapping[str, Any] | None = None
    ) -> RawAnswer:
        """Have the request answered by a replica that serves `model`. An empty `model` is the first one of the key."""
        name = model or self._router.default(access)
        if fields is not None:
            access.check_model(self._router.name(name))
        deadline = time.monotonic() + _WAIT_S
        lease = await self._fleet.acquire(lambda: self._router.resolve(name, None), least_loaded, deadline)
        try:
            body = b"" if fields is None else _encode({**fields, "model": lease.version})
            status, answer = await lease.replica.upstream.fetch(method, path, body, timeout_s=_ANSWER_S)
            return RawAnswer(status, answer)
        except UpstreamError as error:
            lease.replica.suspect()
            message = f"The inference server did not answer: {error}"
            raise ApiError(502, "bad_upstream", message) from error
        finally:
            lease.release()
