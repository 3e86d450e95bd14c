"""Token counts: requests that sample nothing and so record nothing. vLLM answers them; the gateway only resolves the
model's name to a version first."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest, RawAnswer
from rollout_gateway.dialects.calls import Fields, RequestParams, read_fields
from rollout_gateway.dialects.messages import MessagesTranslation, messages_error
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.errors import ApiError, bad_answer
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.replicas import Fleet, least_loaded
from rollout_gateway.serving.routing import VersionRouter

_encode = msgspec.json.Encoder().encode
_WAIT_S = 60.0
_ANSWER_S = 30.0


class _Count(msgspec.Struct):
    count: int


@dataclass(eq=False)
class TokenRoutes:
    """Handlers of these routes. All raise `ApiError`."""

    _fleet: Fleet
    _router: VersionRouter
    _permitted: Permitted

    async def tokenize(self, request: ControlRequest) -> RawAnswer:
        fields, params = read_fields(request.http.body, RequestParams)
        self._permitted.check(fields)
        return await self._tokenize(request.access, params.model, fields)

    async def count_tokens(self, request: ControlRequest) -> RawAnswer:
        """The tokens of a message's prompt, tools included, in Anthropic's format."""
        call = MessagesTranslation(request.http.body).call()
        self._permitted.check(call.fields)
        prompt: Fields = {name: call.fields[name] for name in ("messages", "tools") if name in call.fields}
        answer = await self._tokenize(request.access, call.params.model, prompt)
        if answer.status != 200:
            return RawAnswer(answer.status, messages_error(answer.body, answer.status))
        try:
            count = msgspec.json.decode(answer.body, type=_Count).count
        except msgspec.DecodeError as error:
            raise bad_answer("/tokenize", error) from error
        return RawAnswer(200, _encode({"input_tokens": count}))

    async def _tokenize(self, access: Access, model: str, fields: Fields) -> RawAnswer:
        access.check_model(self._router.name(model))
        deadline = time.monotonic() + _WAIT_S
        lease = await self._fleet.acquire(lambda: self._router.resolve(model, None), least_loaded, deadline)
        try:
            body = _encode({**fields, "model": lease.version})
            return RawAnswer(
                *await lease.replica.upstream.fetch("POST", "/tokenize", body, timeout_s=_ANSWER_S)
            )
        except UpstreamError as error:
            lease.replica.suspect()
            message = f"The inference server did not answer: {error}"
            raise ApiError(502, "bad_upstream", message) from error
        finally:
            lease.release()
