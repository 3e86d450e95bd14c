"""The ASGI application: routes, bodies, identity and errors, with nothing between it and the server.

A web framework would cost as much per call as capture does (docs/gateway.md has the figures), for a dozen routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast
from urllib.parse import parse_qs, unquote

import msgspec

from pipeline.broker import BrokerError
from pipeline.log import get_logger
from pipeline.names import InvalidNameError
from rollout_gateway import routes, wire
from rollout_gateway.chat import Caller, ChatHandler, ClientGoneError
from rollout_gateway.control import Control, read_body
from rollout_gateway.dialects import CHAT, COMPLETIONS, Dialect
from rollout_gateway.errors import ApiError, unavailable
from rollout_gateway.identity import Headers, Identity
from rollout_gateway.messages_api import MessagesTranslation, error_type, messages_error
from rollout_gateway.metrics import Metrics
from rollout_gateway.promotion import Action, Decision, Promotion
from rollout_gateway.responses_api import ResponsesTranslation
from rollout_gateway.routing import Router
from rollout_gateway.translate import Translation, translated
from rollout_gateway.watchers import Watchers

log = get_logger("rollout_gateway.app")

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_WATCH_AFTER_S = 0.25
"""A plain call that takes longer has its client watched; for shorter ones the watch would cost more than the call."""
_encode = msgspec.json.Encoder().encode

_DIALECTS: dict[str, Dialect] = {d.path: d for d in (CHAT, COMPLETIONS)}

_TRANSLATED: dict[str, Callable[[bytes], Translation]] = {
    ResponsesTranslation.path: ResponsesTranslation,
    MessagesTranslation.path: MessagesTranslation,
}

_MODEL_CALLS = _DIALECTS.keys() | _TRANSLATED.keys()

SIDE_CALL_HEADER = b"x-journeyman-side-call"


class App:
    """The gateway's routes."""

    def __init__(
        self,
        chat: ChatHandler,
        control: Control,
        promotion: Promotion,
        identity: Identity,
        router: Router,
        watchers: Watchers,
        metrics: Metrics,
        max_body_bytes: int,
    ) -> None:
        self._chat, self._control, self._promotion = chat, control, promotion
        self._identity, self._router = identity, router
        self._watchers, self._metrics = watchers, metrics
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']}")
        try:
            await self._route(scope, receive, send)
        except ApiError as error:
            await _answer(send, error.status, error.body(), error.headers)
        except InvalidNameError as error:
            refused = ApiError(400, str(error), code="invalid_name")
            await _answer(send, refused.status, refused.body())
        except ClientGoneError:
            pass  # what there was to record is recorded, and no one listens
        except BrokerError as error:
            refused = unavailable(f"The log does not answer: {error}", "log_unavailable")
            await _answer(send, refused.status, refused.body(), refused.headers)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        method: str = scope["method"]
        named = None
        if path.startswith("/t/"):
            named, slash, rest = scope["raw_path"].decode("latin-1").partition("?")[0][3:].partition("/")
            named, path = unquote(named), slash + rest
        if path in _MODEL_CALLS:
            if method != "POST":
                raise routes.not_allowed("POST")
            await self._model_call(path, scope, receive, send, named)
            return
        await self._control_call(method, path, scope, receive, send)

    # -- control -------------------------------------------------------------------------------------------------

    async def _control_call(self, method: str, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        route, values = routes.find(method, path)
        headers: Headers = dict(scope["headers"])
        body = await self._body(receive, headers) if method == "POST" else b""
        control, answer = self._control, None
        if route.key == "trajectory":
            await self._identity.check_for(headers, values[0])
        elif route.key:
            self._identity.check(headers, operator=route.key == "operator")
        match route.name:
            case "health":
                answer = control.health()
            case "metrics":
                await _answer(
                    send, 200, self._metrics.text().encode(), content_type=b"text/plain; version=0.0.4"
                )
                return
            case "openapi":
                answer = routes.openapi()
            case "models":
                answer = control.models()
            case "model":
                answer = control.model(values[0])
            case "policies":
                answer = control.policies()
            case "watch":
                await self._watch_policies(receive, send)
                return
            case "decide":
                decision = read_body(body, Decision)
                action = cast(Action, route.parts[-1])
                answer = await self._promotion.decide(values[0], action, decision)
            case "open":
                answer = await control.open(body, _base_url(scope, headers), _traceparent(headers))
            case "list":
                query = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode("latin-1")).items()}
                answer = control.list(query)
            case "get":
                answer = await control.get(values[0])
            case "complete":
                answer = await control.complete(values[0], body)
            case "complete_group":
                answer = await control.complete_group(values[0], body)
        await _answer(send, route.status, _encode(answer))

    async def _watch_policies(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE})
        events = self._watchers.watch(self._control.policies())
        caller = Caller()
        caller.when_gone(self._leaving(asyncio.current_task()))
        watch = asyncio.ensure_future(_watch(receive, caller))
        try:
            await _send_events(send, events)
        except asyncio.CancelledError:
            if not caller.gone:
                raise
        finally:
            watch.cancel()

    @staticmethod
    def _leaving(task: asyncio.Task[Any] | None) -> Callable[[], None]:
        def leave() -> None:
            if task is not None:
                task.cancel()

        return leave

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _model_call(
        self, path: str, scope: Scope, receive: Receive, send: Send, named: str | None
    ) -> None:
        """A call of any of the four endpoints, counted."""
        started, status = time.perf_counter(), 500
        headers: Headers = dict(scope["headers"])
        try:
            body = await self._body(receive, headers)
            dialect = _DIALECTS.get(path)
            if dialect is None:
                status = await self._translated_call(path, body, headers, receive, send, named)
                return
            call = dialect.read(body)
            caller = await self._caller(call, named, headers)
            answer = self._streamed if call.stream else self._plain
            status = await answer(dialect, call, caller, receive, send)
        except ApiError as error:
            status = error.status
            raise
        except ClientGoneError:
            status = 499
            raise
        finally:
            self._metrics.call(path, status, time.perf_counter() - started)

    async def _caller(self, call: wire.Call, named: str | None, headers: Headers) -> Caller:
        trajectory = await self._identity.trajectory(named, headers, call)
        self._router.check(call.asked.model, trajectory)
        return Caller(
            trajectory,
            _traceparent(headers),
            headers.get(b"x-stainless-retry-count", b"0") != b"0",
            headers.get(SIDE_CALL_HEADER, b"") in (b"1", b"true"),
        )

    async def _translated_call(
        self, path: str, body: bytes, headers: Headers, receive: Receive, send: Send, named: str | None
    ) -> int:
        """A call of another API: as a chat completion there, and back. The status."""
        try:
            translation = _TRANSLATED[path](body)
            call = CHAT.read(_encode(translation.chat()), path)
            caller = await self._caller(call, named, headers)
            return await self._translated(translation, call, caller, receive, send)
        except ApiError as error:
            answer = error.body()
            if path == MessagesTranslation.path:
                error.kind = error_type(error.status)
                answer = messages_error(error.body())
            await _answer(send, error.status, answer, error.headers)
            return error.status

    async def _translated(
        self, translation: Translation, call: wire.Call, caller: Caller, receive: Receive, send: Send
    ) -> int:
        watch = asyncio.ensure_future(_watch(receive, caller))
        try:
            if not call.stream:
                status, body = await self._chat.plain(CHAT, call, caller)
                if status == 200:
                    answer = _encode(translation.answer(msgspec.json.decode(body)))
                else:
                    answer = translation.error(body)
                await _answer(send, status, answer)
                return status
            status, events = await self._chat.stream(CHAT, call, caller)
            if isinstance(events, bytes):
                await _answer(send, status, translation.error(events))
                return status
            await send({"type": "http.response.start", "status": status, "headers": _SSE})
            await _send_events(send, translated(translation, events))
            return status
        finally:
            watch.cancel()

    async def _plain(
        self, dialect: Dialect, call: wire.Call, caller: Caller, receive: Receive, send: Send
    ) -> int:
        watch: list[asyncio.Task[None]] = []
        timer = asyncio.get_running_loop().call_later(
            _WATCH_AFTER_S, lambda: watch.append(asyncio.ensure_future(_watch(receive, caller)))
        )
        try:
            status, body = await self._chat.plain(dialect, call, caller)
        finally:
            timer.cancel()
            for task in watch:
                task.cancel()
        await _answer(send, status, body)
        return status

    async def _streamed(
        self, dialect: Dialect, call: wire.Call, caller: Caller, receive: Receive, send: Send
    ) -> int:
        watch = asyncio.ensure_future(_watch(receive, caller))
        try:
            status, events = await self._chat.stream(dialect, call, caller)
            if isinstance(events, bytes):
                await _answer(send, status, events)
                return status
            await send({"type": "http.response.start", "status": status, "headers": _SSE})
            await _send_events(send, events)
            return status
        finally:
            watch.cancel()

    async def _body(self, receive: Receive, headers: Headers) -> bytes:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            return body
        parts, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body} bytes.", code="body_too_large")


async def _watch(receive: Receive, caller: Caller) -> None:
    """Until the client goes away, and then say so."""
    while (await receive())["type"] != "http.disconnect":
        pass
    caller.leave()


async def _send_events(send: Send, events: AsyncIterator[bytes]) -> None:
    async for data in events:
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    content_type: bytes = b"application/json",
) -> None:
    said = ((b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers)
    await send({"type": "http.response.start", "status": status, "headers": said})
    await send({"type": "http.response.body", "body": body})


def _traceparent(headers: Headers) -> str:
    value = headers.get(b"traceparent", b"").decode("latin-1")
    return value if len(value) == 55 and value.isascii() else ""


def _base_url(scope: Scope, headers: Headers) -> str:
    host = headers.get(b"host", b"").decode("latin-1")
    if not host:
        host = "{}:{}".format(*scope["server"])
    return f"{scope['scheme']}://{host}"
