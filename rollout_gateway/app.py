"""From an HTTP request to its answer. `http.server` calls the one `App` with each request whose head has come.

A request goes to a route of the control API (`api.routes`), or it is a model call. By the head, the request's origin,
URL and key are checked; only then is its body read. A model call is then read (`dialects`), its trajectory found
(`capture.identity`), and it is answered by a policy (`capture.handler`) or by an outside model, which is a provider's
(`outside.relay`). An outside model whose run was given to a policy, its apprentice, is that policy's master. Errors of
all these become answers here.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

import anyio
import anyio.to_thread
import msgspec

from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError, check_name
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway, RawAnswer
from rollout_gateway.api.routes import Route, decode_segment, find_route, not_allowed
from rollout_gateway.api.trajectories import traceparent
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.capture.handler import UnsureError
from rollout_gateway.capture.identity import KeyKind, named_run
from rollout_gateway.dialects.calls import CHAT, COMPLETIONS, Call
from rollout_gateway.dialects.endpoints import read_chat, read_completion
from rollout_gateway.dialects.messages import MessagesTranslation, messages_error
from rollout_gateway.dialects.prompts import Sent, read_sent, with_prompt
from rollout_gateway.dialects.responses import ResponsesTranslation, unknown_reference
from rollout_gateway.dialects.translate import TranslatedSink, Translation
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping
from rollout_gateway.http.request import HeaderList, Headers, Request
from rollout_gateway.outside.relay import NotAnsweredError
from rollout_gateway.outside.requests import OutsideCall

log = get_logger("rollout_gateway.app")

_encode = msgspec.json.Encoder().encode

_READERS: dict[str, Callable[[bytes], Call]] = {CHAT: read_chat, COMPLETIONS: read_completion}
_TRANSLATIONS: dict[str, Callable[[bytes], Translation]] = {
    ResponsesTranslation.path: ResponsesTranslation,
    MessagesTranslation.path: MessagesTranslation,
}
_MODEL_CALLS = _READERS.keys() | _TRANSLATIONS.keys()

_Read = TypeVar("_Read")
_LARGE_BODY = 256 * 1024
"""Bytes. Smaller bodies are decoded within a few milliseconds."""
LEFT_OUT_HEADER = b"x-journeywork-left-out"
"""Types of tools that a call named and the model was not shown."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_NOT_FOR_MASTER = ("not_recorded", "stopping", "trajectory_completed", "trajectory_expired")
"""Errors of an apprentice's call for which its master is not asked: its answer could not be recorded either."""
SIDE_CALL_HEADER = b"x-journeywork-side-call"
ROLE_HEADER = b"x-journeywork-role"


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
    prompt: str = ""
    """Id of the promoted prompt that `_put_prompt` put into a model call; empty if it put none."""
    sent: Sent | None = None
    """What the call said before that."""


class App:
    """Answers every request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._calls, self._identity = gateway, gateway.calls, gateway.identity
        self._max_calls = gateway.config.gateway.max_calls or sys.maxsize
        self._running: set[Request] = set()
        """Model calls under way, and requests to the control API."""
        self._stopping = False
        self._large_bodies = anyio.CapacityLimiter(1)

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
        if path in _MODEL_CALLS:
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
            if path in _MODEL_CALLS:
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
            return await self._answer_call(request, admitted)
        finally:
            self._running.discard(request)

    async def _answer_call(self, request: Request, admitted: _Admitted) -> int:
        """Answer a model call whose body has come. Returns the status."""
        await self._put_prompt(request, admitted)
        call, translation = await self._read_call(request, admitted.path)
        if translation is not None:
            return await self._translated_call(request, admitted, translation, call)
        caller = await self._caller(call, admitted, request)
        if isinstance(call, OutsideCall):
            ask = partial(self._ask_apprentice, request, admitted, call, caller)
            apprentice = ask if _apprentice_has_run(caller, call) else None
            return await self._gateway.relay.answer(request, call, caller, admitted.access, apprentice)
        return await self._plain_call(request, call, caller)

    async def _plain_call(self, request: Request, call: Call, caller: Caller) -> int:
        """Answer a call of vLLM's own API. Returns the status."""
        status, answer = await self._calls.answer(call, caller, request if call.stream else None)
        _check_apprentice_answered(caller, status)
        if not request.started:
            await request.answer(status, answer)
        return status

    async def _ask_apprentice(self, request: Request, admitted: _Admitted, call: OutsideCall, caller: Caller) -> int:
        """Answer a call of an outside model by the apprentice that has its run. Returns the status.

        Raises `NotAnsweredError` if its master is to answer, because the apprentice is unsure, late or refused; and
        `ApiError`. `Relay.answer` calls it."""
        assert caller.trajectory is not None
        opened, wait_s, detector = caller.trajectory.opened, call.tables[0].apprentice_wait_s, self._gateway.detector
        own: Call = call
        try:
            read = partial(self._read_for_policy, admitted.path, request.body)
            own, translation = await self._read_large_in_thread(request, read)
            own.params.model, own.held = opened.model, opened.min_logprob is not None and own.stream
            caller = replace(caller, wait_s=wait_s, min_logprob=opened.min_logprob)
            if detector is not None:
                detector.replace(call, own)
            if translation is not None:
                return await self._translated_call(request, admitted, translation, own, caller)
            return await self._plain_call(request, own, caller)
        except (ApiError, UnsureError) as error:
            final = isinstance(error, ApiError) and (not wait_s or error.code in _NOT_FOR_MASTER)
            if request.started or final:
                raise
            if detector is not None:
                detector.replace(own, call)
            raise NotAnsweredError(opened.pinned or opened.model, str(error)) from error

    async def _put_prompt(self, request: Request, admitted: _Admitted) -> None:
        """Put a promoted prompt in place of the agent's, if a decision in force has one for the call."""
        if not self._gateway.router.has_prompts():
            return
        access = admitted.access
        sent = await self._read_large_in_thread(request, partial(read_sent, request.body))
        metadata = None if admitted.path in _TRANSLATIONS else sent.metadata  # its `metadata` names no run
        run = access.trajectory or named_run(admitted.trajectory, request.headers, metadata).trajectory
        opening = await self._gateway.registry.opening(run) if run else None
        if opening is not None and not (access.trajectory or access.owns(opening.owner)):
            return  # the call is refused, as for a run that does not exist
        decision = self._gateway.router.prompt_for(sent.model, opening)
        if decision is None:
            return
        put = partial(with_prompt, admitted.path, request.body, decision.replaces, decision.prompt)
        if (body := await self._read_large_in_thread(request, put)) is not None:
            request.body, admitted.prompt, admitted.sent = body, decision.prompt_id, sent

    def _read_for_policy(self, path: str, body: bytes) -> tuple[Call, Translation | None]:
        """Read and check the body of a call that a policy answers."""
        translation = _TRANSLATIONS[path](body) if path in _TRANSLATIONS else None
        call = translation.call() if translation is not None else _READERS[path](body)
        self._gateway.permitted.check(call.fields)
        return call, translation

    async def _read_call(self, request: Request, path: str) -> tuple[Call, Translation | None]:
        """Read and check the body of a model call."""

        def read() -> tuple[Call, Translation | None]:
            if (outside := self._gateway.relay.read(path, request.body)) is not None:
                return outside, None
            return self._read_for_policy(path, request.body)

        return await self._read_large_in_thread(request, read)

    async def _read_large_in_thread(self, request: Request, read: Callable[[], _Read]) -> _Read:
        """Return what `read` makes of the request's body. Large bodies are decoded in a thread, one at a time, so that
        other requests are answered meanwhile."""
        if len(request.body) < _LARGE_BODY:
            return read()
        return await anyio.to_thread.run_sync(read, limiter=self._large_bodies)

    def _check_calls(self, owner: str) -> None:
        """Raise a 429 `ApiError` if `gateway.max_calls` is exceeded, and `owner` has more than its share: the limit
        divided by the number of owners with calls. So calls that take long hold up their own key alone."""
        if len(self._running) <= self._max_calls:
            return
        calls = Counter(request.owner for request in self._running)
        if calls[owner] > max(1, self._max_calls // len(calls)):
            raise ApiError(429, "too_many_calls", "The gateway has reached gateway.max_calls. Try again.")

    async def _caller(self, call: Call, admitted: _Admitted, request: Request, *, detect: bool = True) -> Caller:
        """Find the trajectory of a call, check that the call may name its model, and read the request's headers.
        `detect`: whether the call's messages may tell the trajectory. Raises `ApiError`."""
        headers = request.headers
        trajectory = await self._identity.trajectory(admitted.access, admitted.trajectory, headers, call, detect=detect)
        self._gateway.router.check(call.params.model, trajectory.opened if trajectory is not None else None)
        if trajectory is not None:
            self._gateway.router.check_agents_name(call.params.model, trajectory.opened)
        return Caller(
            trajectory,
            traceparent(headers),
            headers.get(b"x-stainless-retry-count", b"0") != b"0",
            headers.get(SIDE_CALL_HEADER, b"") in (b"1", b"true"),
            _role(headers),
            request.cancellation,
            prompt=admitted.prompt,
        )

    async def _translated_call(
        self, request: Request, admitted: _Admitted, translation: Translation, call: Call, known: Caller | None = None
    ) -> int:
        """Answer a call of `/v1/responses` or `/v1/messages` as the chat completion `call` that it was translated into.
        `known`: its caller, if that was found already. Returns the status."""
        if admitted.sent is not None:
            translation.instructions = admitted.sent.instructions
        if translation.continued:
            caller = await self._continued_call(translation, call, admitted, request, known)
        else:
            caller = known or await self._caller(call, admitted, request)
        translation.stored = caller.trajectory is not None
        headers = _left_out_header(translation)
        sink = TranslatedSink(request, translation, headers) if call.stream else None
        status, answer = await self._calls.answer(call, caller, sink)
        if status == 400 and translation.merge_system():
            merged = translation.call()
            call.body, call.fields = merged.body, merged.fields
            self._gateway.permitted.check(call.fields)
            status, answer = await self._calls.answer(call, caller, sink)
        _check_apprentice_answered(caller, status)
        if status == 200 and not call.stream:
            await request.answer(200, _encode(translation.answer(msgspec.json.decode(answer))), headers)
        if not request.started:
            await request.answer(status, translation.error(answer, status))
        return status

    async def _continued_call(
        self, translation: Translation, call: Call, admitted: _Admitted, request: Request, known: Caller | None
    ) -> Caller:
        """Put the recorded answers that a call refers to into it, from the log. Return its caller."""
        # Its messages are not complete yet. A trajectory that the call names otherwise says what it may refer to.
        caller = known or await self._caller(call, admitted, request, detect=False)
        async with self._gateway.api_keys.reading(request.owner) as read:
            exchanges = await self._gateway.registry.exchanges_of(translation.continued, admitted.access, read)
        for missing in translation.continued - exchanges.keys():
            raise unknown_reference(missing)
        whole = translation.call(exchanges)
        call.body, call.fields = whole.body, whole.fields  # the same object: the detector knows the call by it
        return await self._caller(call, admitted, request) if caller.trajectory is None else caller


def _apprentice_has_run(caller: Caller, call: OutsideCall) -> bool:
    """Whether the call is of a run that an apprentice has taken over from the outside model."""
    opened = caller.trajectory.opened if caller.trajectory is not None else None
    return opened is not None and opened.asked == call.params.model != opened.model


def _check_apprentice_answered(caller: Caller, status: int) -> None:
    """Raise an `ApiError` for an error of the inference server, if an apprentice is asked: its master answers then.
    Other clients get the error as it is."""
    if status != 200 and caller.wait_s:
        raise ApiError(status, "apprentice_refused", f"the inference server answered {status}")


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


def _role(headers: Headers) -> str:
    """Return the agent that calls, escaped as in URLs; empty where none is named. Raises `InvalidNameError`."""
    name = unquote(headers.get(ROLE_HEADER, b"").decode("latin-1"))
    return check_name(name) if name else ""


def _left_out_header(translation: Translation) -> HeaderList:
    """The header that names the tools which the model was not shown, if there are any. The names are a client's: only
    the first are shown, cut, and without what a header can't hold."""
    left_out = [_NOT_IN_NAMES.sub("?", name[:64]) for name in translation.left_out[:16]]
    if not left_out:
        return ()
    log.warning("tools that only OpenAI can run were left out", types=left_out)
    return ((LEFT_OUT_HEADER, ", ".join(left_out).encode()),)
