"""The control API of a gateway in memory, for tests of the SDK: it opens and completes trajectories and forgets
nothing at a restart."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import anyio.lowlevel
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from journeywork import AsyncJourneywork
from tests.conftest import free_port

MAX_REWARD = 1e3
"""As `gateway.max_reward` by default."""


@dataclass
class StubGateway:
    port: int = field(default_factory=free_port)
    opened: dict[str, dict[str, Any]] = field(default_factory=dict)
    completed: dict[str, dict[str, Any]] = field(default_factory=dict)
    most_open: int = 0
    away: bool = False
    """Whether completions are answered with 503, as while the log cannot be reached."""
    sent: list[dict[str, Any]] = field(default_factory=list)
    """Results that clients sent, refused ones included."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Results of entrants that clients recorded."""
    step: int = 3
    """The policy step that is served."""
    decided: dict[str, dict[str, str]] = field(default_factory=dict)
    """Group to what the gateway says of it: `status`, and `version` or `reason`. Other groups are waiting."""
    retired: set[str] = field(default_factory=set)
    """Versions that cannot be pinned."""
    completed_by_others: dict[str, Any] | None = None
    """A result that every trajectory gets from somebody else before its own arrives."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer to a request."""
        match method, *map(unquote, path.partition("?")[0].removeprefix("/v1/").split("/")):
            case "GET", "policies":
                return 200, {"data": [{"model": "m", "version": f"m@{self.step}", "step": self.step}]}
            case "GET", "models":
                names = ["m", *(f"m@{step}" for step in range(13))]
                return 200, {"data": [{"id": name} for name in names if name not in self.retired]}
            case "POST", "evaluations":
                self.evaluations.append(body)
                return 201, {"object": "evaluation"}
            case "GET", "groups", group:
                return 200, {"group": group, "status": "waiting", **self.decided.get(group, {})}
            case "GET", "trajectories":
                return 200, {"data": list(self.opened.values())}
            case "POST", "trajectories":
                return self._open(body)
            case "GET", "trajectories", name:
                return self._get(name)
            case "POST", "trajectories", name, "complete":
                return self._complete(name, body)
        raise AssertionError(f"{method} {path} is not asked by any test")

    def _open(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("pinned") in self.retired:
            return _refusal(404, "no such version", "model_not_found")
        self.opened[body["id"]] = body
        self.most_open = max(self.most_open, len(self.opened) - len(self.completed))
        told = {"id": body["id"], "model": body["model"], "group": body.get("group", body["id"])}
        return 201, {**told, "base_url": f"{self.url}/v1", "api_key": "k"}

    def _complete(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if name not in self.opened:
            return _refusal(404, f"no trajectory {name}", "trajectory_not_found")
        self.sent.append(body)
        if self.away:
            return _refusal(503, "the log is away")
        if abs(body.get("reward") or 0) > MAX_REWARD:
            return _refusal(400, f"The value of `reward` is {body['reward']:g}.", "reward_out_of_range")
        if self.completed.setdefault(name, self.completed_by_others or body) != body:
            return _refusal(409, "another result", "trajectory_completed")
        used = {"calls": 2, "prompt_tokens": 20, "sampled_tokens": 4, "calls_s": 0.5}
        return 200, {"id": name, "exchanges": 3, **used}

    def _get(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self.opened:
            return _refusal(404, f"no trajectory {name}", "trajectory_not_found")
        result = self.completed.get(name)
        told = {"task": "", "group": name, **self.opened[name], "status": "completed" if result else "open"}
        if result:
            told |= {"outcome": result.get("outcome", "scored"), "reward": result.get("reward")}
        return 200, told

    def client(self) -> AsyncJourneywork:
        """Return a client that this gateway answers without a network: for tests of what is played."""
        return _DirectClient(self)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve over HTTP while the block runs; a second block on the same object is a restart."""

        async def handle(request: Request) -> JSONResponse:
            body = await request.json() if request.method == "POST" else {}
            status, told = self.answer(request.method, str(request.url).removeprefix(self.url), body)
            return JSONResponse(told, status)

        app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=1))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        async with anyio.create_task_group() as running:
            running.start_soon(server._serve)
            with anyio.fail_after(60):
                while not server.started:
                    await anyio.sleep(0.01)
            try:
                yield
            finally:
                server.should_exit = True


def _refusal(status: int, message: str, code: str = "") -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "code": code}}


class _DirectClient(AsyncJourneywork):
    def __init__(self, gateway: StubGateway) -> None:
        super().__init__(gateway.url)
        self._gateway = gateway

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> httpx.Response:
        await anyio.lowlevel.checkpoint()  # others may run, as while an answer comes
        status, told = self._gateway.answer(method, path, json.loads(json.dumps(body or {})))
        return httpx.Response(status, json=told)
