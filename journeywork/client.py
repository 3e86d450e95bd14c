"""Open and complete trajectories over HTTP, blocking and asynchronous.

Requests are retried for up to `wait_s` seconds while the gateway is unreachable or overloaded; after that they raise
`GatewayUnavailableError`. A retry is safe: the client chooses the trajectory's id, so a repeated request opens or
completes the same trajectory. If the gateway refuses a request, `JourneyworkError` is raised with the gateway's status,
code and message.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast
from urllib.parse import quote

import anyio
import anyio.from_thread
import httpx
from typing_extensions import Unpack

from journeywork import gathering, transport
from journeywork.evaluation import playing
from journeywork.trajectory import (
    CompleteOptions,
    FeedbackOptions,
    OpenOptions,
    Trajectory,
    Usage,
    checked_result,
    feedback_body,
    parse_policy,
)

P = ParamSpec("P")
Result = TypeVar("Result")
_TIMEOUT_S = 60.0
"""Seconds that a request may wait to connect, to send, or for the next bytes of its answer."""


def _new_id() -> str:
    """Return a random trajectory id with the present time, by which a gateway recognises an expired trajectory."""
    return f"t-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(10)}"


def _opening_body(model: str, options: OpenOptions) -> dict[str, Any]:
    """Return the body of the request that opens a trajectory: a new id unless `options` have one, and `pinned` with the
    base model under its one name."""
    opening: dict[str, Any] = {"model": model, "id": _new_id(), **options}
    if pinned := options.get("pinned"):
        opening["pinned"] = parse_policy(pinned)[1] or pinned
    return opening


def _trajectory_of(body: Mapping[str, Any], send_feedback: Callable[..., Any]) -> Trajectory:
    """Return the trajectory in the gateway's answer to its opening. Raises `JourneyworkError` for the answer of another
    server. `send_feedback` is what the trajectory's own `feedback` calls."""
    try:
        fields = {name: body[name] for name in ("id", "model", "group", "base_url", "api_key")}
        return Trajectory(**fields, _send_feedback=send_feedback)
    except KeyError as missing:
        raise transport.JourneyworkError(
            f"the answer to opening a trajectory lacks {missing}: is this the gateway's URL?"
        ) from None


def _leaves_open(failure: Exception) -> bool:
    """Return whether a failed completion left the trajectory open, so that it has to be completed as `no_result`.

    It did not if another result was accepted before (409). While the gateway is unreachable, this is not known, and the
    result may still be sent later: false."""
    if isinstance(failure, transport.JourneyworkError):
        return failure.status != transport.CONFLICT and not isinstance(failure, transport.GatewayUnavailableError)
    return True


def _path(trajectory: str, action: str = "") -> str:
    """Return the path of a trajectory. Raises `ValueError` for an empty id, whose path is that of the list."""
    if not trajectory:
        raise ValueError("the id of the trajectory is empty")
    return f"/v1/trajectories/{quote(trajectory, safe='')}{action}"


class AsyncJourneywork:
    """An asynchronous client of one gateway, for asyncio or trio. `url` defaults to $JOURNEYWORK_URL. White space
    around `api_key` is removed.

    Raises `ValueError` for a URL without a scheme, and for a key that no HTTP header can hold."""

    def __init__(self, url: str | None = None, *, api_key: str = "", wait_s: float = 120.0) -> None:
        self.url, self._wait_s = transport.gateway_url(url), wait_s
        self._http = httpx.AsyncClient(base_url=self.url, headers=transport.authorization(api_key), timeout=_TIMEOUT_S)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def open(self, model: str, **options: Unpack[OpenOptions]) -> Trajectory:
        """Open a trajectory of `model`. Raises `JourneyworkError` when the gateway refuses it."""
        body = await self._request("POST", "/v1/trajectories", _opening_body(model, options))
        return _trajectory_of(body, self._feedback_of_runs)

    async def complete(self, trajectory: str, **result: Unpack[CompleteOptions]) -> dict[str, Any]:
        """Complete a trajectory. A second call with the same result has no effect; another result raises
        `JourneyworkError` (409). Raises `TypeError` or `ValueError` for a result that cannot be sent."""
        return await self._request("POST", _path(trajectory, "/complete"), {**checked_result(result)})

    async def feedback(
        self, answer: Any = None, *, trajectory: str = "", **options: Unpack[FeedbackOptions]
    ) -> dict[str, Any]:
        """Give feedback, at any time, on the call that an answer belongs to, on a run, or rank several (`ranking`).

        `answer`: the answer or its id; with `trajectory` also the call's number, and without it the feedback is on the
        whole run. Raises `JourneyworkError` if the gateway refuses it, and `TypeError` or `ValueError` for what cannot
        be sent."""
        body = feedback_body(answer, trajectory, options)
        body.setdefault("key", f"f-{secrets.token_hex(10)}")  # a retry is the same feedback
        path = _path(trajectory, "/feedback") if trajectory else "/v1/feedback"
        return await self._request("POST", path, body)

    async def get(self, trajectory: str) -> dict[str, Any]:
        """Return a trajectory as `GET /v1/trajectories/<id>` describes it: its opening, status and result."""
        return await self._request("GET", _path(trajectory))

    async def group(self, group: str, model: str = "") -> dict[str, Any]:
        """Return whether a group was trained (and in which version) or discarded (and why). `model` may be left out if
        there is one only."""
        query = f"?model={quote(model, safe='')}" if model else ""
        return await self._request("GET", f"/v1/groups/{quote(group, safe='')}{query}")

    async def policies(self) -> list[dict[str, Any]]:
        """Return for each model the version its name currently resolves to, and the loaded versions."""
        return list((await self._request("GET", "/v1/policies"))["data"])

    async def models(self) -> list[str]:
        """Return the names that `model` of a call may hold: models, and their versions."""
        return [model["id"] for model in (await self._request("GET", "/v1/models"))["data"]]

    async def record_evaluation(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Record the results of one entrant of an evaluation on the log: the fields of `policy.evaluated` in
        `journeywork docs`. Recording them again has no effect."""
        return await self._request("POST", "/v1/evaluations", result)

    gather = gathering.gather
    evaluate = playing.play

    @asynccontextmanager
    async def trajectory(self, model: str, **options: Unpack[OpenOptions]) -> AsyncIterator[Trajectory]:
        """Open a trajectory, and complete it when the `with` block ends.

        If the block raises, or the gateway refuses the result, the trajectory is completed with the outcome `no_result`
        and the exception is re-raised. `GatewayUnavailableError` at the block's end leaves the trajectory as it is:
        `complete(run.id, **run.result())` completes it later."""
        options = {**options, "id": options.get("id") or _new_id()}
        try:
            run = await self.open(model, **options)
        except self._cancellation_errors():
            # The gateway may have opened it already. It is asked once: the opening has waited for it.
            with self._shield(), suppress(httpx.TransportError):
                path = _path(options["id"], "/complete")
                await self._send("POST", path, {"outcome": "no_result"}, _TIMEOUT_S)
            raise
        try:
            yield run
        except BaseException as failure:
            await self._give_up(run, failure)
            raise
        try:
            with self._shield():  # the run is over: its result is not lost to a cancellation
                run.usage = Usage.of_completion(await self.complete(run.id, **run.result()))
        except Exception as failure:
            if _leaves_open(failure):
                await self._give_up(run, failure)
            raise

    async def _give_up(self, run: Trajectory, failure: BaseException) -> None:
        """Complete a trajectory as `no_result` after `failure`, which gets a note if that is refused, too."""
        run.outcome = "no_result"
        with self._shield():
            try:
                await self.complete(run.id, outcome="no_result")
            except transport.JourneyworkError as error:
                failure.add_note(f"its trajectory could not be completed as no_result: {error}")

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> dict[str, Any]:
        """Send a request, and retry it while the gateway is unreachable or overloaded. Return the JSON of the response.

        `timeout_s` bounds every wait of one attempt: to connect, to send, and for the next bytes of the answer.
        Raises `GatewayUnavailableError` if the gateway stays away longer than `wait_s`, and `JourneyworkError` if it
        refuses the request."""
        backoff = transport.Backoff(self._wait_s)
        while True:
            pause_s = 0.0
            try:
                reply = await self._send(method, path, body, timeout_s)
            except httpx.TransportError as error:
                last_problem = backoff.report_unreachable(self.url, transport.transport_problem(error))
            else:
                if reply.status_code not in transport.RETRIED_STATUSES:
                    return transport.json_of(reply)
                backoff.wait_for_training(reply)
                last_problem, pause_s = transport.status_problem(reply), transport.retry_after_s(reply)
            await self._pause(backoff.next_pause(last_problem, pause_s))

    # -- what the blocking client does otherwise -----------------------------------------------------------------

    @property
    def _feedback_of_runs(self) -> Callable[..., Any]:
        """What `Trajectory.feedback` calls: a coroutine function here, and a blocking function in `_BlockingCore`."""
        return self.feedback

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> httpx.Response:
        """Send a request once. Raises `httpx.TransportError` if no answer comes."""
        return await self._http.request(method, path, json=body, timeout=timeout_s)

    async def _pause(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def _shield(self) -> AbstractContextManager[Any]:
        """Return a context that no cancellation ends."""
        return anyio.CancelScope(shield=True)

    def _cancellation_errors(self) -> tuple[type[BaseException], ...]:
        """Return the classes of the exception that a cancellation raises."""
        return (anyio.get_cancelled_exc_class(),)


class _BlockingCore(AsyncJourneywork):
    """The same client with blocking requests and pauses: what its coroutines await has always ended already, so each
    of them runs from start to end in one step (`_finish`), without an event loop."""

    def __init__(self, url: str | None, *, api_key: str, wait_s: float) -> None:
        self.url, self._wait_s = transport.gateway_url(url), wait_s
        self._blocking_http = httpx.Client(
            base_url=self.url, headers=transport.authorization(api_key), timeout=_TIMEOUT_S
        )

    @property
    def _feedback_of_runs(self) -> Callable[..., Any]:
        return lambda *args, **options: _finish(self.feedback(*args, **options))

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> httpx.Response:
        return self._blocking_http.request(method, path, json=body, timeout=timeout_s)

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop

    def _shield(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _cancellation_errors(self) -> tuple[type[BaseException], ...]:
        return ()


def _finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine of `_BlockingCore` in one step, and return its result, which Python hands over in
    `StopIteration`."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("Result", end.value)
    raise RuntimeError("a blocking request waits for an event loop")  # pragma: no cover


def _blocking(
    method: Callable[Concatenate[AsyncJourneywork, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Journeywork, P], Result]:
    """Return a method of `Journeywork` that does what `method` does, and returns when it has ended."""

    @functools.wraps(method)
    def run_and_wait(self: Journeywork, /, *args: P.args, **options: P.kwargs) -> Result:
        return _finish(method(self._core, *args, **options))

    return run_and_wait


def _in_own_loop(
    method: Callable[Concatenate[AsyncJourneywork, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Journeywork, P], Result]:
    """Return a method of `Journeywork` that runs `method` in an event loop of its own, in another thread: rollouts may
    be coroutine functions, and the calling thread may have a running event loop, for example in a notebook."""

    @functools.wraps(method)
    def run_and_wait(self: Journeywork, /, *args: P.args, **options: P.kwargs) -> Result:
        async def run() -> Result:
            # A client of its own: connections belong to one event loop.
            async with AsyncJourneywork(self.url, api_key=self._api_key, wait_s=self._wait_s) as client:
                return await method(client, *args, **options)

        with anyio.from_thread.start_blocking_portal() as portal:
            return portal.call(run)

    return run_and_wait


class Journeywork:
    """A blocking client of one gateway, with the methods of `AsyncJourneywork`."""

    def __init__(self, url: str | None = None, *, api_key: str = "", wait_s: float = 120.0) -> None:
        self._core = _BlockingCore(url, api_key=api_key, wait_s=wait_s)
        self.url, self._api_key, self._wait_s = self._core.url, api_key, wait_s

    def close(self) -> None:
        self._core._blocking_http.close()

    def __enter__(self) -> Journeywork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    open = _blocking(AsyncJourneywork.open)
    complete = _blocking(AsyncJourneywork.complete)
    feedback = _blocking(AsyncJourneywork.feedback)
    get = _blocking(AsyncJourneywork.get)
    group = _blocking(AsyncJourneywork.group)
    policies = _blocking(AsyncJourneywork.policies)
    models = _blocking(AsyncJourneywork.models)
    record_evaluation = _blocking(AsyncJourneywork.record_evaluation)
    gather = _in_own_loop(AsyncJourneywork.gather)
    evaluate = _in_own_loop(AsyncJourneywork.evaluate)

    @contextmanager
    def trajectory(self, model: str, **options: Unpack[OpenOptions]) -> Iterator[Trajectory]:
        """As `AsyncJourneywork.trajectory`."""
        # The context manager is asynchronous, and `_core` needs no event loop: it is entered and left by hand.
        context = self._core.trajectory(model, **options)
        run = _finish(context.__aenter__())
        try:
            yield run
        except BaseException as failure:
            _finish(context.__aexit__(type(failure), failure, failure.__traceback__))
            raise
        _finish(context.__aexit__(None, None, None))
