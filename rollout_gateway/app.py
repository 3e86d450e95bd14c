"""From a request to its answer: routes, identity and errors."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec

from pipeline.config import GatewayConfig
from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api import openapi, routes
from rollout_gateway.api.auxiliary import Aside
from rollout_gateway.api.control import Control, read_body
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.capture.chat import ChatHandler
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.capture.identity import Identity
from rollout_gateway.dialects import calls as wire
from rollout_gateway.dialects.endpoints import CHAT, COMPLETIONS, Dialect
from rollout_gateway.dialects.messages import MessagesTranslation, messages_error
from rollout_gateway.dialects.responses import TOOL_NAMES, ResponsesTranslation, previous_not_found
from rollout_gateway.dialects.translate import TranslatedStream, Translation
from rollout_gateway.http.content_encoding import decode_body
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping, too_many_calls, unavailable
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.request import HeaderList, Headers, Request
from rollout_gateway.serving.policy_feed import Watchers
from rollout_gateway.serving.promotion import Action, Decision, Promotion
from rollout_gateway.serving.routing import Router

log = get_logger("rollout_gateway.app")

_SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_encode = msgspec.json.Encoder().encode

_DIALECTS: dict[str, Dialect] = {d.path: d for d in (CHAT, COMPLETIONS)}

_TRANSLATED: dict[str, Callable[[bytes], Translation]] = {
    ResponsesTranslation.path: ResponsesTranslation,
    MessagesTranslation.path: MessagesTranslation,
}

_MODEL_CALLS = _DIALECTS.keys() | _TRANSLATED.keys()

LEFT_OUT_HEADER = b"x-journeyman-left-out"
"""Types of tools that a call named and the model was not shown."""
SIDE_CALL_HEADER = b"x-journeyman-side-call"


@dataclass(eq=False, slots=True)
class _Admitted:
    """What the head of a request says, its key checked."""

    access: Access
    path: str = ""
    named: str | None = None
    """The trajectory that the URL names."""
    route: routes.Route | None = None
    """`None` for a model call, and for a CORS preflight, which has no `path` either."""
    values: list[str] = field(default_factory=list)
    query: str = ""


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
        aside: Aside,
        origins: OriginPolicy,
        config: GatewayConfig,
    ) -> None:
        self._calls, self._max_calls = 0, config.max_calls or sys.maxsize
        self._origins, self._max_control_body = origins, config.http.max_control_body_bytes
        self._aside = aside
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

    def admit(self, request: Request) -> None:
        """Check where a request comes from, its URL and its key, by its head alone. Raises `ApiError`.

        Nothing is read from the log for a request before its key is known to be good, nor is its body kept."""
        if self._origins.check(request):
            request.admitted = _Admitted(Access())
            return
        path, _, query = request.target.partition("?")
        named = None
        if path.startswith("/t/"):
            part, slash, rest = path[3:].partition("/")
            named, path = routes.decoded(part) or None, slash + rest
        if path in _MODEL_CALLS:
            if request.method != "POST":
                raise routes.not_allowed("POST")
            access = self._identity.admit(request.headers, "call", named)
            request.admitted = _Admitted(access, path, named)
            return
        route, values = routes.find(request.method, path)
        if route.key != "call":
            request.max_body = min(request.max_body, self._max_control_body)
        access = Access()
        if route.name == "health":
            with suppress(ApiError):  # without a good key it says less
                access = self._identity.admit(request.headers, "call", None)
        if route.key:
            about = values[0] if route.key == "trajectory" else named
            access = self._identity.admit(request.headers, route.key, about)
        request.admitted = _Admitted(access, path, named, route, values, query)

    async def __call__(self, request: Request) -> None:
        try:
            if request.refusal is not None:
                self._count_refused(request, request.refusal)
                raise request.refusal
            if b"content-encoding" in request.headers and not request.too_large:
                coding = request.headers[b"content-encoding"]
                request.body = await decode_body(request.body, coding, request.max_body)
            admitted: _Admitted = request.admitted
            if admitted.route is not None:
                await self._control_call(request, admitted, admitted.route)
            elif admitted.path:
                await self._model_call(request, admitted)
            else:
                request.answer(204, b"")
        except ApiError as error:
            _refuse(request, error)
        except InvalidNameError as error:
            _refuse(request, ApiError(400, str(error), code="invalid_name"))
        except ClientGoneError:
            pass  # what there was to record is recorded, and no one listens
        except BrokerError as error:
            _refuse(request, _no_log(error))

    def _count_refused(self, request: Request, refusal: ApiError) -> None:
        path = _api_of(request)
        if path in _MODEL_CALLS:
            self._metrics.call(path, refusal.status, 0.0)

    # -- control -------------------------------------------------------------------------------------------------

    async def _control_call(self, request: Request, admitted: _Admitted, route: routes.Route) -> None:
        headers, body = request.headers, _body(request)
        control, answer = self._control, None
        access, values = admitted.access, admitted.values
        if (
            access.trajectory and route.key and route.name != "response"
        ):  # which charges when it finds the run
            opened = await self._identity.charge(access.trajectory)
            access = replace(access, models=frozenset((opened.model,)))
        if route.key == "trajectory":
            await self._identity.reach(access, values[0], complete=route.name == "complete")
        match route.name:
            case "health":
                answer = control.health(access if access.operator or access.owner else None)
            case "metrics":
                text = self._metrics.text().encode()
                request.answer(200, text, content_type=b"text/plain; version=0.0.4")
                return
            case "ping":
                request.answer(200, b"")
                return
            case "version":
                request.answer(*await self._aside.version())
                return
            case "tokens":
                request.answer(*await self._aside.tokens(admitted.path, body, access))
                return
            case "count_tokens":
                status, counted = await self._aside.count(body, access)
                request.answer(status, counted if status == 200 else messages_error(counted, status))
                return
            case "response":
                trajectory = await self._identity.held(access, admitted.named, headers)
                answer = await self._aside.response(values[0], trajectory)
            case "openapi":
                request.answer(200, openapi.encoded())
                return
            case "models":
                answer = control.models(access)
            case "model":
                answer = control.model(values[0], access)
            case "policies":
                answer = control.policies(access)
            case "watch":
                await self._watch_policies(request, access)
                return
            case "decide":
                access.check_model(values[0])
                decision = read_body(body, Decision)
                action = cast(Action, route.parts[-1])
                answer = await self._promotion.decide(values[0], action, decision, access.owner)
            case "open":
                if self._stopping:
                    raise stopping()
                base_url = self._origins.base_url(request)
                answer = await control.open(body, base_url, _traceparent(headers), access)
            case "list":
                asked = {k: v[-1] for k, v in parse_qs(admitted.query, keep_blank_values=True).items()}
                answer = await control.list(asked, access)
            case "get":
                answer = await control.get(values[0])
            case "complete":
                answer = await control.complete(values[0], body)
            case "complete_group":
                answer = await control.complete_group(values[0], body, access)
        request.answer(route.status, _encode(answer))

    async def _watch_policies(self, request: Request, access: Access) -> None:
        task = asyncio.current_task()
        assert task is not None
        request.on_gone = lambda: cast(None, task.cancel())
        request.start(200, _SSE)
        try:
            async for event in self._watchers.watch(self._control.policies(access), access):
                request.write(event)
                await request.drain()
        except asyncio.CancelledError:
            if not request.gone:
                raise
        request.end()

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _model_call(self, request: Request, admitted: _Admitted) -> None:
        """A call of any of the four endpoints, counted."""
        path = admitted.path
        started, status = time.perf_counter(), 500
        self._calls += 1
        try:
            dialect = _DIALECTS.get(path)
            if dialect is None:
                status = await self._translated_call(path, request, admitted)
                return
            call = dialect.read(self._read(request))
            caller = await self._caller(call, admitted, request)
            if call.stream:
                status, answer = await self._chat.stream(dialect, call, caller, _StreamSink(request))
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

    async def _caller(self, call: wire.Call, admitted: _Admitted, request: Request) -> Caller:
        headers = request.headers
        trajectory = await self._identity.trajectory(admitted.access, admitted.named, headers, call)
        self._router.check(call.params.model, trajectory)
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

    async def _translated_call(self, path: str, request: Request, admitted: _Admitted) -> int:
        """A call of another API: as a chat completion there, and back. The status."""
        try:
            translation = _TRANSLATED[path](self._read(request))
            call = _chat_call(translation, translation.chat())
            if isinstance(translation, ResponsesTranslation) and translation.previous:
                caller, call = await self._continued(translation, call, admitted, request)
            else:
                caller = await self._caller(call, admitted, request)
            if isinstance(translation, ResponsesTranslation):
                translation.stored = self._chat.keeps(caller)
            notes = _notes(translation)
            if call.stream:
                listener = _TranslatedStreamSink(request, translation, notes)
                status, answer = await self._chat.stream(CHAT, call, caller, listener)
            else:
                status, answer = await self._chat.plain(CHAT, call, caller)
                if status == 200:
                    request.answer(200, _encode(translation.answer(msgspec.json.decode(answer))), notes)
            if not request.started:
                request.answer(status, translation.error(answer, status))
            return status
        except (ApiError, BrokerError) as failed:
            error = failed if isinstance(failed, ApiError) else _no_log(failed)
            _refuse(request, error)
            return error.status

    async def _continued(
        self, translation: ResponsesTranslation, call: wire.Call, admitted: _Admitted, request: Request
    ) -> tuple[Caller, wire.Call]:
        """A response that goes on from another: with the messages of that one, from the log."""
        del call.fields["messages"]  # they are not all, and so say nothing of whose call it is
        caller = await self._caller(call, admitted, request)
        before = None
        if caller.trajectory is not None:
            before = await self._chat.answered(caller.trajectory, translation.previous)
        if before is None:
            raise previous_not_found(translation.request.previous_response_id or "")
        return caller, _chat_call(translation, translation.chat(before))


class _StreamSink:
    """The client of a streamed call."""

    def __init__(self, request: Request, notes: HeaderList = ()) -> None:
        self.request, self._notes = request, notes

    def start(self, flow: Callable[[bool], None]) -> None:
        self.request.start(200, (*_SSE, *self._notes))
        self.request.on_flow = flow

    @property
    def write_chunks(self) -> Callable[[bytes], None] | None:
        return self.request.write_chunks if self.request.chunked else None

    def write(self, data: bytes) -> None:
        self.request.write(data)

    def end(self) -> None:
        self.request.end()


class _TranslatedStreamSink(_StreamSink):
    """The same, through another API."""

    def __init__(self, request: Request, translation: Translation, notes: HeaderList) -> None:
        super().__init__(request, notes)
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


def _api_of(request: Request) -> str:
    """The path of a request without the trajectory that it may name."""
    path = request.target.partition("?")[0]
    return "/" + path[3:].partition("/")[2] if path.startswith("/t/") else path


def _refuse(request: Request, error: ApiError) -> None:
    """Answer with an error, in the format of the API that was asked."""
    if request.started:
        return
    body, path = error.body(), _api_of(request)
    if path == MessagesTranslation.path or path.startswith(MessagesTranslation.path + "/"):
        body = messages_error(body, error.status)
    request.answer(error.status, body, error.headers)


def _chat_call(translation: Translation, chat: dict[str, Any]) -> wire.Call:
    """The chat completion that a call of another API became."""
    call = CHAT.read(_encode(chat), translation.path)
    if isinstance(translation, ResponsesTranslation) and translation.names:
        call.body = _encode({**chat, "metadata": {TOOL_NAMES: translation.names}})
    return call


def _notes(translation: Translation) -> HeaderList:
    """What a client may want to know of how its call was translated."""
    left_out = translation.left_out if isinstance(translation, ResponsesTranslation) else ()
    if not left_out:
        return ()
    log.warning("tools that can't run here were left out", types=left_out)
    return ((LEFT_OUT_HEADER, ", ".join(left_out).encode()),)


def _no_log(error: BrokerError) -> ApiError:
    return unavailable(f"The log does not answer: {error}", "log_unavailable")


def _traceparent(headers: Headers) -> str:
    value = headers.get(b"traceparent", b"").decode("latin-1")
    return value if len(value) == 55 and value.isascii() else ""
