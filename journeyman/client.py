"""Open and complete trajectories over HTTP, blocking and asynchronous.

The client names each trajectory, so every call can be repeated safely; it is repeated for up to `wait_s` seconds
while the gateway restarts. Then it raises `GatewayUnavailableError`. A refusal raises `JourneymanError` with the
gateway's status, code and message."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import anyio
import anyio.from_thread
import httpx
from typing_extensions import Unpack

from journeyman import gathering
from journeyman.gathering import Comparison, Evaluation, GatherOptions, Rollout, Task, TaskGroup
from journeyman.trajectory import CompleteOptions, OpenOptions, Trajectory

Result = TypeVar("Result")

_RETRIED = (429, 502, 503, 504)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class JourneymanError(Exception):
    """The gateway refused a request. `status` is the HTTP status, `code` the error code of docs/gateway.md."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GatewayUnavailableError(JourneymanError):
    """No gateway answered in time."""


class _Pauses:
    """Growing pauses until `wait_s` are over."""

    def __init__(self, wait_s: float) -> None:
        self._end, self._pause = time.monotonic() + wait_s, _FIRST_PAUSE_S

    def next(self, problem: str) -> float:
        if time.monotonic() > self._end:
            raise GatewayUnavailableError(f"the gateway does not answer: {problem}")
        pause, self._pause = self._pause, min(self._pause * 2, _LONGEST_PAUSE_S)
        return pause


def _url(url: str | None) -> str:
    found = url or os.environ.get("JOURNEYMAN_URL")
    if not found:
        raise ValueError("no gateway URL: pass `url` or set the environment variable JOURNEYMAN_URL")
    return found.rstrip("/")


def _read(reply: httpx.Response) -> dict[str, Any]:
    try:
        body: dict[str, Any] = reply.json()
    except ValueError as invalid:
        kind = reply.headers.get("content-type", "no content type")
        raise JourneymanError(
            f"{reply.url} answered {reply.status_code} with {kind}, not JSON: is this URL the gateway's? "
            f"{reply.text[:200]!r}",
            status=reply.status_code,
        ) from invalid
    if reply.is_success:
        return body
    error = body.get("error") or {}
    raise JourneymanError(
        str(error.get("message", reply.text)), status=reply.status_code, code=str(error.get("code"))
    )


def _new_id() -> str:
    return f"t-{secrets.token_hex(10)}"


def _opening(model: str, options: OpenOptions) -> dict[str, Any]:
    return {"model": model, "id": _new_id(), **options}


def _opened(body: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{name: body[name] for name in ("id", "model", "group", "base_url", "api_key")})


def _complete_path(trajectory: str) -> str:
    return f"/v1/trajectories/{quote(trajectory, safe='')}/complete"


class Journeyman:
    """A blocking client of one gateway. `url` defaults to $JOURNEYMAN_URL."""

    def __init__(self, url: str | None = None, *, api_key: str = "", wait_s: float = 120.0) -> None:
        self.url, self._api_key, self._wait_s = _url(url), api_key, wait_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Journeyman:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, model: str, **options: Unpack[OpenOptions]) -> Trajectory:
        """Open a trajectory of `model`. Raises `JourneymanError` when the gateway refuses it."""
        return _opened(self._call("POST", "/v1/trajectories", _opening(model, options)))

    def complete(self, trajectory: str, **result: Unpack[CompleteOptions]) -> dict[str, Any]:
        """Complete a trajectory. Repeating the call with the same result changes nothing."""
        return self._call("POST", _complete_path(trajectory), {**result})

    def get(self, trajectory: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/trajectories/{quote(trajectory, safe='')}")

    def policies(self) -> list[dict[str, Any]]:
        """Per model: what its name stands for now, and what is loaded."""
        return list(self._call("GET", "/v1/policies")["data"])

    def gather(
        self,
        model: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        group_size: int = 8,
        split: Literal["train", "val"] = "train",
        pinned: str = "",
        **options: Unpack[GatherOptions],
    ) -> list[TaskGroup[Task]]:
        """Play `group_size` attempts at each task at once. See `journeyman.gathering.gather`."""
        return self._in_loop(
            gathering.gather,
            model,
            tasks,
            rollout,
            group_size=group_size,
            split=split,
            pinned=pinned,
            **options,
        )

    def evaluate(
        self,
        model: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        attempts: int = 1,
        **options: Unpack[GatherOptions],
    ) -> Evaluation:
        """Score a model or version on held-out tasks. See `journeyman.gathering.evaluate`."""
        return self._in_loop(gathering.evaluate, model, tasks, rollout, attempts=attempts, **options)

    def compare(
        self,
        first: str,
        second: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        attempts: int = 1,
        **options: Unpack[GatherOptions],
    ) -> Comparison:
        """Evaluate two models or versions on the same tasks. See `journeyman.gathering.compare`."""
        return self._in_loop(gathering.compare, first, second, tasks, rollout, attempts=attempts, **options)

    def _in_loop(self, function: Callable[..., Awaitable[Result]], *args: Any, **options: Any) -> Result:
        """Run an asynchronous function of `gathering` in an event loop of its own thread, so that notebooks can call
        it too."""

        async def run() -> Result:
            async with AsyncJourneyman(self.url, api_key=self._api_key, wait_s=self._wait_s) as client:
                return await function(client, *args, **options)

        with anyio.from_thread.start_blocking_portal() as portal:
            return portal.call(run)

    @contextmanager
    def trajectory(self, model: str, **options: Unpack[OpenOptions]) -> Iterator[Trajectory]:
        """Open a run and complete it when the block ends. An exception in the block completes it as `no_result` and
        is raised."""
        run = self.open(model, **options)
        try:
            yield run
        except BaseException:
            run.outcome = "no_result"
            self.complete(run.id, **run.result())
            raise
        self.complete(run.id, **run.result())

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        pauses = _Pauses(self._wait_s)
        while True:
            try:
                reply = self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if reply.status_code not in _RETRIED:
                    return _read(reply)
                problem = reply.text
            time.sleep(pauses.next(problem))


class AsyncJourneyman:
    """As `Journeyman`, for asyncio or trio."""

    def __init__(self, url: str | None = None, *, api_key: str = "", wait_s: float = 120.0) -> None:
        self.url, self._wait_s = _url(url), wait_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncJourneyman:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def open(self, model: str, **options: Unpack[OpenOptions]) -> Trajectory:
        """Open a trajectory of `model`. Raises `JourneymanError` when the gateway refuses it."""
        return _opened(await self._call("POST", "/v1/trajectories", _opening(model, options)))

    async def complete(self, trajectory: str, **result: Unpack[CompleteOptions]) -> dict[str, Any]:
        """Complete a trajectory. Repeating the call with the same result changes nothing."""
        return await self._call("POST", _complete_path(trajectory), {**result})

    async def get(self, trajectory: str) -> dict[str, Any]:
        return await self._call("GET", f"/v1/trajectories/{quote(trajectory, safe='')}")

    async def policies(self) -> list[dict[str, Any]]:
        """Per model: what its name stands for now, and what is loaded."""
        return list((await self._call("GET", "/v1/policies"))["data"])

    async def gather(
        self,
        model: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        group_size: int = 8,
        split: Literal["train", "val"] = "train",
        pinned: str = "",
        **options: Unpack[GatherOptions],
    ) -> list[TaskGroup[Task]]:
        """Play `group_size` attempts at each task at once. See `journeyman.gathering.gather`."""
        return await gathering.gather(
            self, model, tasks, rollout, group_size=group_size, split=split, pinned=pinned, **options
        )

    async def evaluate(
        self,
        model: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        attempts: int = 1,
        **options: Unpack[GatherOptions],
    ) -> Evaluation:
        """Score a model or version on held-out tasks. See `journeyman.gathering.evaluate`."""
        return await gathering.evaluate(self, model, tasks, rollout, attempts=attempts, **options)

    async def compare(
        self,
        first: str,
        second: str,
        tasks: Iterable[Task],
        rollout: Rollout[Task],
        *,
        attempts: int = 1,
        **options: Unpack[GatherOptions],
    ) -> Comparison:
        """Evaluate two models or versions on the same tasks. See `journeyman.gathering.compare`."""
        return await gathering.compare(self, first, second, tasks, rollout, attempts=attempts, **options)

    @asynccontextmanager
    async def trajectory(self, model: str, **options: Unpack[OpenOptions]) -> AsyncIterator[Trajectory]:
        """Open a run and complete it when the block ends. An exception in the block completes it as `no_result` and
        is raised."""
        options = {**options, "id": options.get("id") or _new_id()}
        try:
            run = await self.open(model, **options)
        except anyio.get_cancelled_exc_class():
            # The gateway may have opened it already. If it did not, there is nothing to complete.
            with anyio.CancelScope(shield=True), contextlib.suppress(JourneymanError):
                await self.complete(options["id"], outcome="no_result")
            raise
        try:
            yield run
        except BaseException:
            run.outcome = "no_result"
            with anyio.CancelScope(shield=True):
                await self.complete(run.id, **run.result())
            raise
        await self.complete(run.id, **run.result())

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        pauses = _Pauses(self._wait_s)
        while True:
            try:
                reply = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if reply.status_code not in _RETRIED:
                    return _read(reply)
                problem = reply.text
            await anyio.sleep(pauses.next(problem))
