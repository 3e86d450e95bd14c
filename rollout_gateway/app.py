"""From a request to its answer: routes, identity and errors."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import parse_qs, unquote

import msgspec

from pipeline.broker import BrokerError
from pipeline.log import get_logger
from pipeline.names import InvalidNameError
from rollout_gateway import openapi, routes, wire
from rollout_gateway.chat import ChatHandler
from rollout_gateway.control import Control, read_body
from rollout_gateway.dialects import CHAT, COMPLETIONS, Dialect
from rollout_gateway.errors import ApiError, stopping, too_many_calls, unavailable
from rollout_gateway.exchange import Caller, ClientGoneError
from rollout_gateway.identity import Identity
from rollout_gateway.messages_api import MessagesTranslation, error_type, messages_error
from rollout_gateway.metrics import Metrics
from rollout_gateway.promotion import Action, Decision, Promotion
from rollout_gateway.responses_api import ResponsesTranslation, previous_not_found
from rollout_gateway.routing import Router
from rollout_gateway.server import Headers, Request
from rollout_gateway.translate import TranslatedStream, Translation
from rollout_gateway.watchers import Watchers

log = get_logger("rollout_gateway.app")

_SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
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
        max_calls: int,
    ) -> None:
        self._calls, self._max_calls = 0, max_calls or sys.maxsize
        self._callers: dict[Request, Caller] = {}
        self._stopping = False
        self._chat, self._control, self._promotion = chat, control, promotion
        self._identity, self._router = identity, router
        self._watchers, self._metrics = watchers, metrics

    def stop(self) -> None:
        """From now on, model calls and openings get a 503 `stopping`."""
        self._stopping = True

    def cut_off(self) -> None:
        """End the calls that are under way: each is answered with an error and recorded."""
        for caller in list(self._callers.values()):
            caller.cut_off()

    async def __call__(self, request: Request) -> None:
        try:
            await self._route(request)
        except ApiError as error:
            _refuse(request, error)
        except InvalidNameError as error:
            _refuse(request, ApiError(400, str(error), code="invalid_name"))
        except ClientGoneError:
            pass  # what there was to record is recorded, and no one listens
        except BrokerError as error:
            _refuse(request, _no_log(error))

    async def _route(self, request: Request) -> None:
        path, _, query = request.target.partition("?")
        named = None
        if path.startswith("/t/"):
            named, slash, rest = path[3:].partition("/")
            named, path = unquote(named), slash + rest
        if path in _MODEL_CALLS:
            if request.method != "POST":
                raise routes.not_allowed("POST")
            await self._model_call(path, request, named)
            return
        await self._control_call(request, unquote(path), query)

    # -- control -------------------------------------------------------------------------------------------------

    async def _control_call(self, request: Request, path: str, query: str) -> None:
        route, values = routes.find(request.method, path)
        headers, body = request.headers, _body(request)
        control, answer = self._control, None
        if route.key == "trajectory":
            await self._identity.check_for(headers, values[0])
        elif route.key:
            self._identity.check(headers, operator=route.key == "operator")
        match route.name:
            case "health":
                answer = control.health()
            case "metrics":
                text = self._metrics.text().encode()
                request.answer(200, text, content_type=b"text/plain; version=0.0.4")
                return
            case "openapi":
                answer = openapi.document()
            case "models":
                answer = control.models()
            case "model":
                answer = control.model(values[0])
            case "policies":
                answer = control.policies()
            case "watch":
                await self._watch_policies(request)
                return
            case "decide":
                decision = read_body(body, Decision)
                action = cast(Action, route.parts[-1])
                answer = await self._promotion.decide(values[0], action, decision)
            case "open":
                if self._stopping:
                    raise stopping()
                answer = await control.open(body, _base_url(request), _traceparent(headers))
            case "list":
                asked = {k: v[-1] for k, v in parse_qs(query, keep_blank_values=True).items()}
                answer = control.list(asked)
            case "get":
                answer = await control.get(values[0])
            case "complete":
                answer = await control.complete(values[0], body)
            case "complete_group":
                answer = await control.complete_group(values[0], body)
        request.answer(route.status, _encode(answer))

    async def _watch_policies(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        request.on_gone = lambda: cast(None, task.cancel())
        request.start(200, _SSE)
        try:
            async for event in self._watchers.watch(self._control.policies()):
                request.write(event)
                await request.drain()
        except asyncio.CancelledError:
            if not request.gone:
                raise
        request.end()

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _model_call(self, path: str, request: Request, named: str | None) -> None:
        """A call of any of the four endpoints, counted."""
        started, status = time.perf_counter(), 500
        self._calls += 1
        try:
            dialect = _DIALECTS.get(path)
            if dialect is None:
                status = await self._translated_call(path, request, named)
                return
            call = dialect.read(self._read(request))
            caller = await self._caller(call, named, request)
            if call.stream:
                status, answer = await self._chat.stream(dialect, call, caller, _Listener(request))
            else:
                status, answer = await self._chat.plain(dialect, call, caller)
            if not request.started:
                request.answer(status, answer)
        except ApiError as error:
            status = error.status
            raise
        except ClientGoneError:
            status = 499
            raise
        finally:
            self._calls -= 1
            self._callers.pop(request, None)
            self._metrics.call(path, status, time.perf_counter() - started)

    def _read(self, request: Request) -> bytes:
        """The body of a call that was counted; raises a 429 `ApiError` where there are too many at once."""
        if self._stopping:
            raise stopping()
        if self._calls > self._max_calls:
            raise too_many_calls()
        return _body(request)

    async def _caller(self, call: wire.Call, named: str | None, request: Request) -> Caller:
        headers = request.headers
        trajectory = await self._identity.trajectory(named, headers, call)
        self._router.check(call.asked.model, trajectory)
        caller = Caller(
            trajectory,
            _traceparent(headers),
            headers.get(b"x-stainless-retry-count", b"0") != b"0",
            headers.get(SIDE_CALL_HEADER, b"") in (b"1", b"true"),
        )
        request.on_gone = caller.leave
        caller.gone = request.gone
        self._callers[request] = caller
        return caller

    async def _translated_call(self, path: str, request: Request, named: str | None) -> int:
        """A call of another API: as a chat completion there, and back. The status."""
        try:
            translation = _TRANSLATED[path](self._read(request))
            call = CHAT.read(_encode(translation.chat()), path)
            if isinstance(translation, ResponsesTranslation) and translation.previous:
                caller, call = await self._continued(translation, call, named, request)
            else:
                caller = await self._caller(call, named, request)
            if call.stream:
                listener = _TranslatedListener(request, translation)
                status, answer = await self._chat.stream(CHAT, call, caller, listener)
            else:
                status, answer = await self._chat.plain(CHAT, call, caller)
                if status == 200:
                    request.answer(200, _encode(translation.answer(msgspec.json.decode(answer))))
            if not request.started:
                request.answer(status, translation.error(answer))
            return status
        except (ApiError, BrokerError) as failed:
            error = failed if isinstance(failed, ApiError) else _no_log(failed)
            answer = error.body()
            if path == MessagesTranslation.path:
                error.kind = error_type(error.status)
                answer = messages_error(error.body())
            request.answer(error.status, answer, error.headers)
            return error.status

    async def _continued(
        self, translation: ResponsesTranslation, call: wire.Call, named: str | None, request: Request
    ) -> tuple[Caller, wire.Call]:
        """A response that goes on from another: with the messages of that one, from the log."""
        del call.fields["messages"]  # they are not all, and so say nothing of whose call it is
        caller = await self._caller(call, named, request)
        before = None
        if caller.trajectory is not None:
            before = await self._chat.answered(caller.trajectory, translation.previous)
        if before is None:
            raise previous_not_found(translation.request.previous_response_id or "")
        return caller, CHAT.read(_encode(translation.chat(before)), translation.path)


class _Listener:
    """The client of a streamed call."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def start(self, flow: Callable[[bool], None]) -> None:
        self.request.start(200, _SSE)
        self.request.on_flow = flow

    @property
    def write_chunks(self) -> Callable[[bytes], None] | None:
        return self.request.write_chunks if self.request.chunked else None

    def write(self, data: bytes) -> None:
        self.request.write(data)

    def end(self) -> None:
        self.request.end()


class _TranslatedListener(_Listener):
    """The same, through another API."""

    def __init__(self, request: Request, translation: Translation) -> None:
        super().__init__(request)
        self._stream = TranslatedStream(translation)

    def start(self, flow: Callable[[bool], None]) -> None:
        super().start(flow)
        self.request.write(self._stream.begin())

    @property
    def write_chunks(self) -> None:
        return None  # another API's events are others

    def write(self, data: bytes) -> None:
        self.request.write(self._stream.take(data))

    def end(self) -> None:
        self.request.write(self._stream.end())
        self.request.end()


def _body(request: Request) -> bytes:
    if request.too_large:
        raise ApiError(413, "The body is larger than this gateway takes.", code="body_too_large")
    return request.body


def _refuse(request: Request, error: ApiError) -> None:
    if not request.started:
        request.answer(error.status, error.body(), error.headers)


def _no_log(error: BrokerError) -> ApiError:
    return unavailable(f"The log does not answer: {error}", "log_unavailable")


def _traceparent(headers: Headers) -> str:
    value = headers.get(b"traceparent", b"").decode("latin-1")
    return value if len(value) == 55 and value.isascii() else ""


def _base_url(request: Request) -> str:
    host = request.headers.get(b"host", b"").decode("latin-1")
    return f"http://{host or request.server}"
