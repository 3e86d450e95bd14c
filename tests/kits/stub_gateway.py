"""The control API of a gateway in memory, for tests of the SDK: it opens and completes trajectories and forgets
nothing at a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

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
    refused_attempts: set[int] = field(default_factory=set)
    """Attempt numbers whose trajectories cannot be opened."""
    completed_by_others: dict[str, Any] | None = None
    """A result that every trajectory gets from somebody else before its own arrives."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _open(self, request: Request) -> JSONResponse:
        body = await request.json()
        if body.get("pinned") in self.retired:
            return JSONResponse({"error": {"message": "no such version", "code": "model_not_found"}}, 404)
        if body.get("attempt") in self.refused_attempts:
            return JSONResponse({"error": {"message": "not this attempt", "code": "invalid_body"}}, 400)
        self.opened[body["id"]] = body
        self.most_open = max(self.most_open, len(self.opened) - len(self.completed))
        told = {"id": body["id"], "model": body["model"], "group": body.get("group", body["id"])}
        return JSONResponse({**told, "base_url": f"{self.url}/v1", "api_key": "k"}, 201)

    async def _list(self, _: Request) -> JSONResponse:
        return JSONResponse({"data": list(self.opened.values())})

    async def _complete(self, request: Request) -> JSONResponse:
        name, body = request.path_params["name"], await request.json()
        if name not in self.opened:
            return JSONResponse(
                {"error": {"message": f"no trajectory {name}", "code": "trajectory_not_found"}}, 404
            )
        self.sent.append(body)
        if self.away:
            return JSONResponse({"error": {"message": "the log is away"}}, 503)
        if abs(body.get("reward") or 0) > MAX_REWARD:
            message = f"The value of `reward` is {body['reward']:g}."
            return JSONResponse({"error": {"message": message, "code": "reward_out_of_range"}}, 400)
        if self.completed.setdefault(name, self.completed_by_others or body) != body:
            return JSONResponse({"error": {"message": "another result", "code": "trajectory_completed"}}, 409)
        return JSONResponse(
            {"id": name, "exchanges": 3, "calls": 2, "prompt_tokens": 20, "sampled_tokens": 4, "calls_s": 0.5}
        )

    async def _evaluated(self, request: Request) -> JSONResponse:
        self.evaluations.append(await request.json())
        return JSONResponse({"object": "evaluation"}, 201)

    async def _get(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in self.opened:
            return JSONResponse(
                {"error": {"message": f"no trajectory {name}", "code": "trajectory_not_found"}}, 404
            )
        result = self.completed.get(name)
        told = {"task": "", "group": name, **self.opened[name], "status": "completed" if result else "open"}
        if result:
            told |= {"outcome": result.get("outcome", "scored"), "reward": result.get("reward")}
        return JSONResponse(told)

    async def _group(self, request: Request) -> JSONResponse:
        name = request.path_params["name"]
        return JSONResponse({"group": name, "status": "waiting", **self.decided.get(name, {})})

    async def _policies(self, _: Request) -> JSONResponse:
        return JSONResponse({"data": [{"model": "m", "version": f"m@{self.step}", "step": self.step}]})

    async def _models(self, _: Request) -> JSONResponse:
        names = ["m", *(f"m@{step}" for step in range(13))]
        return JSONResponse({"data": [{"id": name} for name in names if name not in self.retired]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve while the block runs; a second block on the same object is a restart."""
        app = Starlette(
            routes=[
                Route("/v1/policies", self._policies),
                Route("/v1/models", self._models),
                Route("/v1/evaluations", self._evaluated, methods=["POST"]),
                Route("/v1/trajectories", self._list, methods=["GET"]),
                Route("/v1/trajectories", self._open, methods=["POST"]),
                Route("/v1/trajectories/{name}", self._get, methods=["GET"]),
                Route("/v1/groups/{name}", self._group, methods=["GET"]),
                Route("/v1/trajectories/{name}/complete", self._complete, methods=["POST"]),
            ]
        )
        server = uvicorn.Server(
            uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=1)
        )
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        async with anyio.create_task_group() as running:
            running.start_soon(server._serve)
            with anyio.fail_after(20):
                while not server.started:
                    await anyio.sleep(0.01)
            try:
                yield
            finally:
                server.should_exit = True
