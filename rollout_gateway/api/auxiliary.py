"""What clients ask of an inference server beside completions: token counts, tokens, its version, a response again.

Nothing here is sampled, so nothing is recorded. vLLM answers; the gateway resolves the model's name to a version first.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec

from rollout_gateway.access.api_keys import Access
from rollout_gateway.capture.chat import ChatHandler
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.dialects.calls import RequestParams, read_fields
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation, completion_of
from rollout_gateway.dialects.translate import read
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.serving.replicas import Fleet, Replica, least_loaded
from rollout_gateway.serving.routing import Router

_encode = msgspec.json.Encoder().encode
_PATIENCE_S = 60.0
_ANSWER_S = 30.0


class TextBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /tokenize` as the API's document has it; `messages` in place of `prompt` are taken too."""

    model: str = ""
    """Empty: the first model."""
    prompt: str


class TokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str = ""
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class CountedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as every client sends it; what `/v1/messages` takes is taken here."""

    role: Literal["user", "assistant"]
    content: str


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens` as the API's document has it."""

    model: str
    messages: Annotated[list[CountedMessage], msgspec.Meta(min_length=1)]


class _Named(RequestParams, kw_only=True):
    model: str = ""


class _Count(msgspec.Struct):
    count: int


class Aside:
    """Answers that are no completions."""

    def __init__(self, fleet: Fleet, router: Router, chat: ChatHandler) -> None:
        self._fleet, self._router, self._chat = fleet, router, chat

    async def _ask(
        self, model: str, method: str, path: str, body: dict[str, Any], access: Access
    ) -> tuple[int, bytes]:
        """Status and body of an answer by a replica that serves `model`."""
        name = model or self._router.first(access)
        if method == "POST":
            access.check_model(self._router.name(name))
        lease = await self._fleet.acquire(
            lambda: self._router.version(name, None), least_loaded, time.monotonic() + _PATIENCE_S
        )
        try:
            data = _encode({**body, "model": lease.version}) if method == "POST" else b""
            return await _fetch(lease.replica, method, path, data)
        finally:
            lease.release()

    async def tokens(self, path: str, body: bytes, access: Access) -> tuple[int, bytes]:
        """`/tokenize` and `/detokenize`, as vLLM has them."""
        fields, asked = read_fields(body, _Named)
        if path == "/detokenize":
            read(body, TokensBody)
        return await self._ask(asked.model, "POST", path, dict(fields), access)

    async def version(self) -> tuple[int, bytes]:
        """`/version`, as vLLM has it."""
        return await self._ask("", "GET", "/version", {}, Access())

    async def count(self, body: bytes, access: Access) -> tuple[int, bytes]:
        """`/v1/messages/count_tokens`, as Anthropic has it: the prompt's tokens, tools included."""
        chat = MessagesTranslation(body).chat()
        asked: dict[str, Any] = {name: chat[name] for name in ("messages", "tools") if name in chat}
        status, answer = await self._ask(chat["model"], "POST", "/tokenize", asked, access)
        if status != 200:
            return status, answer
        return 200, _encode({"input_tokens": msgspec.json.decode(answer, type=_Count).count})

    async def response(self, name: str, trajectory: Trajectory | None) -> dict[str, Any]:
        """A response of this trajectory, from the log. Raises a 404 `ApiError`."""
        completion = completion_of(name)
        found = None
        if trajectory is not None and completion:
            found = await self._chat.answered(trajectory, completion)
        if found is None or found.endpoint != ResponsesTranslation.path:
            raise ApiError(
                404,
                f"Response {name!r} is not of this trajectory, or the log no longer holds it. Name the trajectory by its key, "
                "its URL or a header.",
                kind="not_found_error",
                code="response_not_found",
                param="response_id",
            )
        return ResponsesTranslation.recorded(name, found)


async def _fetch(replica: Replica, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    try:
        return await replica.upstream.fetch(method, path, body, timeout_s=_ANSWER_S)
    except UpstreamError as error:
        replica.suspect()
        raise ApiError(
            502, f"The inference server did not answer: {error}", kind="api_error", code="bad_upstream"
        ) from error
