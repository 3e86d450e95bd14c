"""From an HTTP request to its answer. `http.server` calls the one `App` with each request whose head has come.

A request goes to a route of the control API (`api.routes`), or it is a model call (`model_calls`). By the head, the
request's origin, URL and key are checked; only then is its body read. Errors of all these become answers here.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import msgspec

from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError
from rollout_gateway import model_calls
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway, RawAnswer
from rollout_gateway.api.routes import decode_segment, find_route, not_allowed
from rollout_gateway.capture.identity import KeyKind
from rollout_gateway.dialects.messages import error_body
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping
from rollout_gateway.http.request import Request
from rollout_gateway.model_calls import ModelCalls, ModelRequest


class App:
    """Answers every request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._call_identifier, self._model_calls = gateway, gateway.call_identifier, ModelCalls(gateway)
        self._max_calls = gateway.config.gateway.max_calls or sys.maxsize
        self._running: set[Request] = set()
        """Model calls under way, and requests to the control API."""
        self._stopping = False

    def stop(self) -> None:
        """From now on, answer new model calls and openings with a 503 `stopping`. Calls under way go on."""
        self._stopping = True

    def cut_off(self) -> None:
        """Cancel the requests that are under way. A call among them is answered with an error and recorded."""
        for request in list(self._running):
            request.cancellation.cancel(stopping())

    def _check_head(self, request: Request) -> None:
        """Check the origin and the content encoding of a request. Raises `ApiError`."""
        self._gateway.origins.check(request)
        coding = request.headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity"):
            name = coding.decode("latin-1")[:100]
            message = f"The Content-Encoding {name!r} is not supported: send the body as it is."
            raise ApiError(415, "unsupported_encoding", message)

    def _admit(self, request: Request, wanted: KeyKind, trajectory: str) -> Access:
        """Check and charge the key of a request by its head, and set `request.owner`. Returns the key's permissions.
        Nothing is read from the log or of the body before. `wanted`, `trajectory`: as in `CallIdentifier.admit`, whose
        errors it raises."""
        announced = request.announced if request.announced <= request.max_body else 0  # a longer body is not read
        access = self._call_identifier.admit(request.headers, wanted, trajectory, announced)
        request.owner = self._owner_of(access)
        return access

    def _owner_of(self, access: Access) -> str:
        """Return the name of the API key that sends a request; for a trajectory's token, of the key that opened the
        trajectory. Empty if the trajectory is not in memory, as nothing is read from the log here: such requests count
        as those of one key."""
        if not access.trajectory:
            return access.owner
        run = self._gateway.registry.get(access.trajectory)
        return "" if run is None else run.opened.owner

    async def __call__(self, request: Request) -> None:
        """Answer a request whose head has come. Model calls are counted with their status, refused ones too."""
        started, status, (segment, path) = time.perf_counter(), 500, _split_trajectory(request)
        duration_s: float | None = None
        try:
            self._check_head(request)
            trajectory = decode_segment(segment)
            if path in model_calls.PATHS:
                status = await self._model_call(request, path, trajectory)
            else:
                await self._control_call(request, path, trajectory)
        except ClientGoneError:
            status = 499  # what there was to record is recorded, and nobody waits for an answer
        except (ApiError, BrokerError, InvalidNameError) as error:
            refusal = _as_api_error(error)
            status = refusal.status
            duration_s = time.perf_counter() - started  # a refused client may send its body for seconds yet
            if not request.started:
                body = error_body(path, refusal.body(), status)  # in the format of the API that was asked
                await request.answer(status, body, refusal.headers)
        finally:
            if path in model_calls.PATHS:
                duration_s = time.perf_counter() - started if duration_s is None else duration_s
                self._gateway.metrics.count_call(path, status, duration_s)

    async def _control_call(self, request: Request, path: str, trajectory: str) -> None:
        """Answer a request to the control API, by the handler of its route. `trajectory`: the one that the URL begins
        with; empty if it begins with none."""
        route, values = find_route(request.method, path)
        if route.auth != "call":
            request.max_body = min(request.max_body, self._gateway.config.gateway.http.max_control_body_bytes)
        access = Access()
        if route.auth != "none":
            # The run that a trajectory's token must belong to: the path's parameter, else the one before the path.
            about_run = bool(values) and route.auth in ("trajectory", "completion", "feedback")
            access = self._admit(request, route.auth, values[0] if about_run else trajectory)
        await request.read()
        if route.opens and self._stopping:
            raise stopping()
        if route.auth != "none":
            await self._call_identifier.charge_body(access, request)
            access = await self._call_identifier.authorize(access, route.auth, values[0] if values else "")
        self._running.add(request)
        try:
            if route.auth == "call":
                self._check_call_limit(request.owner)
            answer = await route.handler(ControlRequest(self._gateway, request, access, values))
        finally:
            self._running.discard(request)
        if isinstance(answer, RawAnswer):
            await request.answer(answer.status, answer.body, answer.headers, answer.content_type)
        else:
            await request.answer(route.status, msgspec.json.encode(answer))

    async def _model_call(self, request: Request, path: str, trajectory: str) -> int:
        """Answer a model call. `trajectory`: the one that the URL names, or empty. Returns the status."""
        if request.method != "POST":
            raise not_allowed("POST")
        access = self._admit(request, "call", trajectory)
        if self._stopping:
            raise stopping()
        self._running.add(request)
        try:
            self._check_call_limit(request.owner)
            await request.read()
            await self._call_identifier.charge_body(access, request)
            return await self._model_calls.answer(ModelRequest(request, access, path, trajectory))
        finally:
            self._running.discard(request)

    def _check_call_limit(self, owner: str) -> None:
        """Raise a 429 `ApiError` if more requests than `gateway.max_calls` are under way, and `owner` has more than its
        share: the limit divided by the number of owners with requests. So slow calls hold up their own key alone."""
        if len(self._running) <= self._max_calls:
            return
        calls = Counter(request.owner for request in self._running)
        if calls[owner] > max(1, self._max_calls // len(calls)):
            raise ApiError(429, "too_many_calls", "The gateway has reached gateway.max_calls. Try again.")


def _split_trajectory(request: Request) -> tuple[str, str]:
    """Return the trajectory that the path of a request begins with (`/t/<trajectory>`), percent-encoded, and the rest
    of the path. The trajectory is empty if the path names none."""
    path = request.target.partition("?")[0]
    if not path.startswith("/t/"):
        return "", path
    trajectory, slash, rest = path[3:].partition("/")
    return trajectory, slash + rest


def _as_api_error(error: ApiError | BrokerError | InvalidNameError) -> ApiError:
    """Return the error that a client gets for an exception of a handler."""
    match error:
        case BrokerError():
            return ApiError(503, "log_unavailable", f"The log does not answer: {error}")
        case InvalidNameError():
            return ApiError(400, "invalid_name", str(error))
    return error
