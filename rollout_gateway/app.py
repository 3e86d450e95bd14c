"""From an HTTP request to its answer. `http.server` calls the one `App` with each request whose head has come.

A request goes to a route of the control API (`api.routes`), or it is a model call (`model_calls`). By the head, the
request's origin, URL and key are checked; only then is its body read. Errors of all these become answers here.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError
from rollout_gateway import model_calls
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway, RawAnswer
from rollout_gateway.api.routes import Route, decode_segment, find_route, not_allowed
from rollout_gateway.capture.identity import KeyKind
from rollout_gateway.dialects.messages import MessagesTranslation, messages_error
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping
from rollout_gateway.http.request import Request
from rollout_gateway.model_calls import ModelCalls, ModelRequest

_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, slots=True)
class _Admitted:
    """A request whose head was checked."""

    access: Access
    path: str
    """Path of the URL, without the trajectory that it may begin with."""
    trajectory: str | None
    """The trajectory that the URL names."""
    route: Route | None = None
    """`None` for a model call."""
    values: list[str] = field(default_factory=list)


class App:
    """Answers every request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._identity, self._model_calls = gateway, gateway.identity, ModelCalls(gateway)
        self._max_calls = gateway.config.gateway.max_calls or sys.maxsize
        self._running: set[Request] = set()
        """Model calls under way, and requests to the control API."""
        self._stopping = False

    def stop(self) -> None:
        """From now on, answer model calls and openings with a 503 `stopping`: the gateway ends once the others did."""
        self._stopping = True

    def cut_off(self) -> None:
        """End the calls that are under way. Each is answered with an error and recorded."""
        for request in list(self._running):
            request.cancellation.cancel(stopping())

    def _admit(self, request: Request) -> _Admitted:
        """Check the origin, the URL and the key of a request by its head. Raises `ApiError`.

        Before the key is known to be good, nothing is read from the log or of the body."""
        self._gateway.origins.check(request)
        coding = request.headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            name = coding.decode("latin-1")[:100]
            message = f"The Content-Encoding {name!r} is not supported: send the body as it is."
            raise ApiError(415, "unsupported_encoding", message)
        segment, path = _split_path(request)
        named = decode_segment(segment) or None
        if path in model_calls.PATHS:
            if request.method != "POST":
                raise not_allowed("POST")
            admitted = _Admitted(Access(), path, named)
            wanted: KeyKind = "call"
        else:
            route, values = find_route(request.method, path)
            admitted, wanted = _Admitted(Access(), path, named, route, values), route.auth
            if wanted != "call":
                request.max_body = min(request.max_body, self._gateway.config.gateway.http.max_control_body_bytes)
            if wanted == "none":
                return admitted
            if values and wanted in ("trajectory", "completion", "feedback"):
                named = values[0]
        admitted.access = self._identity.admit(request.headers, wanted, named, _announced(request))
        request.owner = self._owner(admitted.access)
        return admitted

    def _owner(self, access: Access) -> str:
        """The key by which a request is sent: of a trajectory's key, the one that opened the trajectory. All
        trajectories that are not in memory count as one, as nothing is read from the log here."""
        if not access.trajectory:
            return access.owner
        run = self._gateway.registry.get(access.trajectory)
        return "" if run is None else run.opened.owner

    async def __call__(self, request: Request) -> None:
        """Answer a request whose head has come. Model calls are counted with their status, refused ones too."""
        started, status, path = time.perf_counter(), 500, _split_path(request)[1]
        duration_s: float | None = None
        try:
            admitted = self._admit(request)
            if admitted.route is not None:
                await self._control_call(request, admitted, admitted.route)
            else:
                status = await self._model_call(request, admitted)
        except ClientGoneError:
            status = 499  # what there was to record is recorded, and nobody waits for an answer
        except (ApiError, BrokerError, InvalidNameError) as error:
            refusal = _as_api_error(error)
            status = refusal.status
            duration_s = time.perf_counter() - started  # a refused client may send its body for seconds yet
            await _answer_with_error(request, path, refusal)
        finally:
            if path in model_calls.PATHS:
                duration_s = time.perf_counter() - started if duration_s is None else duration_s
                self._gateway.metrics.count_call(path, status, duration_s)

    # -- control -------------------------------------------------------------------------------------------------

    async def _control_call(self, request: Request, admitted: _Admitted, route: Route) -> None:
        """Answer a request to the control API, by the handler of its route."""
        await request.read()
        if route.opens and self._stopping:
            raise stopping()
        access, values = admitted.access, admitted.values
        if route.auth != "none":
            await self._identity.charge_body(access, request)
            access = await self._identity.authorize(access, route.auth, values[0] if values else "")
        self._running.add(request)
        try:
            if route.auth == "call":
                self._check_calls(request.owner)
            answer = await route.handler(ControlRequest(self._gateway, request, access, values))
        finally:
            self._running.discard(request)
        if isinstance(answer, RawAnswer):
            await request.answer(answer.status, answer.body, answer.headers, answer.content_type)
        else:
            await request.answer(route.status, _encode(answer))

    # -- model calls ---------------------------------------------------------------------------------------------

    async def _model_call(self, request: Request, admitted: _Admitted) -> int:
        """Answer a model call. Returns the status."""
        if self._stopping:
            raise stopping()
        self._running.add(request)
        try:
            self._check_calls(request.owner)
            await request.read()
            await self._identity.charge_body(admitted.access, request)
            asked = ModelRequest(request, admitted.access, admitted.path, admitted.trajectory)
            return await self._model_calls.answer(asked)
        finally:
            self._running.discard(request)

    def _check_calls(self, owner: str) -> None:
        """Raise a 429 `ApiError` if `gateway.max_calls` is exceeded, and `owner` has more than its share: the limit
        divided by the number of owners with calls. So calls that take long hold up their own key alone."""
        if len(self._running) <= self._max_calls:
            return
        calls = Counter(request.owner for request in self._running)
        if calls[owner] > max(1, self._max_calls // len(calls)):
            raise ApiError(429, "too_many_calls", "The gateway has reached gateway.max_calls. Try again.")


def _announced(request: Request) -> int:
    """Return the bytes of the body by the request's head; 0 if it does not say, or if the body is not read."""
    return request.announced if request.announced <= request.max_body else 0


def _split_path(request: Request) -> tuple[str, str]:
    """The trajectory that the path of a request begins with, encoded as in URLs, or an empty string; and the rest."""
    path = request.target.partition("?")[0]
    if not path.startswith("/t/"):
        return "", path
    trajectory, slash, rest = path[3:].partition("/")
    return trajectory, slash + rest


def _as_api_error(error: ApiError | BrokerError | InvalidNameError) -> ApiError:
    """The error that a client gets."""
    match error:
        case BrokerError():
            return ApiError(503, "log_unavailable", f"The log does not answer: {error}")
        case InvalidNameError():
            return ApiError(400, "invalid_name", str(error))
    return error


async def _answer_with_error(request: Request, path: str, error: ApiError) -> None:
    """Answer with an error, in the format of the API that was asked."""
    if request.started:
        return
    body = error.body()
    if path == MessagesTranslation.path or path.startswith(MessagesTranslation.path + "/"):
        body = messages_error(body, error.status)
    await request.answer(error.status, body, error.headers)
