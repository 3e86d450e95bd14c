"""Opening and completing trajectories over HTTP, blocking and asynchronous.

Every call is safe to repeat, as the client names the trajectory; so it is repeated while the gateway restarts, for up to
`wait_s` seconds.

Errors: `JourneymanError` with the gateway's status, code and message; `GatewayUnavailableError` when time is up.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import anyio
import httpx

Outcome = Literal["scored", "no_result", "masked"]

_RETRIED = (429, 502, 503, 504)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class JourneymanError(Exception):
    """The gateway refused; `status` and `code` say how."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GatewayUnavailableError(JourneymanError):
    """No gateway answered in time."""


@dataclass
class Trajectory:
    """One agent run. Point any OpenAI client at `base_url` with `api_key`; then say how it went."""

    id: str
    model: str
    group: str
    base_url: str
    api_key: str
    reward: float | None = None
    """What the run was worth; none: the judge decides."""
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome = "scored"
    """`no_result`: infrastructure failed, so the run says nothing of the policy; `masked`: keep it, do not train."""

    @property
    def openai(self) -> dict[str, Any]:
        """Arguments for `openai.OpenAI(**run.openai)`; retries outlast a gateway that restarts."""
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 8}

    def _result(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "rewards": self.rewards,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "outcome": self.outcome,
        }


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
        raise ValueError("say where the gateway is: pass its URL or set JOURNEYMAN_URL")
    return found.rstrip("/")


def _read(reply: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = reply.json()
    if reply.is_success:
        return body
    error = body.get("error", {})
    raise JourneymanError(
        str(error.get("message", reply.text)), status=reply.status_code, code=str(error.get("code"))
    )


def _opening(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": model, "id": f"t-{secrets.token_hex(10)}", **options}


def _opened(body: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{name: body[name] for name in ("id", "model", "group", "base_url", "api_key")})


def _complete_path(trajectory: str) -> str:
    return f"/v1/trajectories/{quote(trajectory, safe='')}/complete"


class Journeyman:
    """A blocking client of one gateway. `url` defaults to $JOURNEYMAN_URL."""

    def __init__(self, url: str | None = None, *, api_key: str = "", wait_s: float = 120.0) -> None:
        self.url, self._wait_s = _url(url), wait_s
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Journeyman:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, model: str, **options: Any) -> Trajectory:
        """Open a trajectory. `options`: group, task, id, split, group_size, attempt, metadata, pinned, key_completes."""
        return _opened(self._call("POST", "/v1/trajectories", _opening(model, options)))

    def complete(self, trajectory: str, **result: Any) -> dict[str, Any]:
        """End it. `result`: reward, rewards, metrics, metadata, outcome."""
        return self._call("POST", _complete_path(trajectory), result)

    def get(self, trajectory: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/trajectories/{quote(trajectory, safe='')}")

    def policies(self) -> list[dict[str, Any]]:
        """Per model: what its name stands for now, and what is loaded."""
        return list(self._call("GET", "/v1/policies")["data"])

    @contextmanager
    def trajectory(self, model: str, **options: Any) -> Iterator[Trajectory]:
        """A run from open to complete. An exception in the block makes it `no_result`, and goes on."""
        run = self.open(model, **options)
        try:
            yield run
        except BaseException:
            run.outcome = "no_result"
            self.complete(run.id, **run._result())
            raise
        self.complete(run.id, **run._result())

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

    async def open(self, model: str, **options: Any) -> Trajectory:
        """Open a trajectory. `options`: group, task, id, split, group_size, attempt, metadata, pinned, key_completes."""
        return _opened(await self._call("POST", "/v1/trajectories", _opening(model, options)))

    async def complete(self, trajectory: str, **result: Any) -> dict[str, Any]:
        """End it. `result`: reward, rewards, metrics, metadata, outcome."""
        return await self._call("POST", _complete_path(trajectory), result)

    async def get(self, trajectory: str) -> dict[str, Any]:
        return await self._call("GET", f"/v1/trajectories/{quote(trajectory, safe='')}")

    async def policies(self) -> list[dict[str, Any]]:
        """Per model: what its name stands for now, and what is loaded."""
        return list((await self._call("GET", "/v1/policies"))["data"])

    @asynccontextmanager
    async def trajectory(self, model: str, **options: Any) -> AsyncIterator[Trajectory]:
        """A run from open to complete. An exception in the block makes it `no_result`, and goes on."""
        run = await self.open(model, **options)
        try:
            yield run
        except BaseException:
            run.outcome = "no_result"
            with anyio.CancelScope(shield=True):
                await self.complete(run.id, **run._result())
            raise
        await self.complete(run.id, **run._result())

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
