"""The HTTP/1.1 server: uvicorn's protocol (`connection`) in front of one handler, `App`. TLS and HTTP/2 are left to a
reverse proxy.

`service` runs it. The handler is called when the head of a request is complete, before its body is read. When a client
goes away, `Request.cancellation` is cancelled. The handler's task itself is not: it may have something to record."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import uvicorn

from pipeline.config import ConfigError, HttpConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.connection import Connection
from rollout_gateway.http.errors import internal_error
from rollout_gateway.http.request import Request, State

logger = get_logger("rollout_gateway.http.server")

Handler = Callable[[Request], Awaitable[None]]

_CHECK_S = 1.0
"""Seconds at most between two checks of the deadlines."""
_OTHER_FILES = 128
"""File descriptors that the process needs for anything but connections."""
_CUT_OFF_S = 10.0
"""How long a call that was cut off may take to be recorded and answered."""


def checked_limits(config: HttpConfig) -> HttpConfig:
    """Return the limits as this process can hold them: raise its limit of open files to the hard limit, and lower
    `max_connections` to what that allows, as a client's connection may need another one to an inference server.

    Raises `ConfigError` if one body may be larger than all bodies together."""
    if config.max_buffered_bytes < config.max_body_bytes:
        raise ConfigError(
            f"gateway.http.max_buffered_bytes ({config.max_buffered_bytes}) is less than "
            f"gateway.http.max_body_bytes ({config.max_body_bytes}): raise the first or lower the second"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    possible = max(1, (soft - _OTHER_FILES) // 2)
    if soft == resource.RLIM_INFINITY or possible >= config.max_connections:
        return config
    logger.warning("fewer connections than gateway.http.max_connections", connections=possible, open_files=soft)
    return msgspec.structs.replace(config, max_connections=possible)


async def _check_deadlines(state: State) -> None:
    """Close connections whose client is silent or slow for too long. Never returns. One task for all connections costs
    less than a timer for each."""
    limits = state.limits
    timeouts = (limits.head_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
    pause_s = min(_CHECK_S, *(timeout / 4 for timeout in timeouts))
    while True:
        await asyncio.sleep(pause_s)
        now = asyncio.get_running_loop().time()
        for connection in list(state.connections):
            assert isinstance(connection, Connection)
            connection.check_deadlines(now)


async def _wait_until_empty(tasks: set[asyncio.Task[None]], wait_s: float) -> list[asyncio.Task[None]]:
    """Wait until `tasks`, the set of running handlers, is empty, for at most `wait_s` seconds. Handlers leave the set
    when they end, and new ones join it. Returns those that still run."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while tasks:
                await asyncio.wait(list(tasks))
    return list(tasks)


async def _drain(tasks: set[asyncio.Task[None]], grace_s: float, cut_off: Callable[[], None]) -> None:
    """Wait for running handlers. After `grace_s` seconds call `cut_off`, which has to end them; after `_CUT_OFF_S`
    more, cancel those that still run."""
    if await _wait_until_empty(tasks, grace_s):
        logger.warning("calls are cut off", calls=len(tasks))
        cut_off()
        for task in await _wait_until_empty(tasks, _CUT_OFF_S):
            task.cancel()
        await _wait_until_empty(tasks, _CUT_OFF_S)


@asynccontextmanager
async def run_server(
    handler: Handler, listener: socket.socket, limits: HttpConfig, *, grace_s: float, cut_off: Callable[[], None]
) -> AsyncIterator[None]:
    """Answer requests on `listener` with `handler` while the block runs.

    When the block is left, running handlers have `grace_s` seconds to end. Then `cut_off` is called, which has to end
    them. Meanwhile new requests still reach the handler, and each connection ends with its next answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application that uvicorn calls for each request. `connection` has put the `Request` into `scope`."""
        request: Request = scope["state"].pop("request")
        request.receive, request.send = receive, send
        try:
            await handler(request)
        except Exception as error:  # noqa: BLE001 - a supervision edge: a request's fault does not end the service
            logger.error("a request failed", target=request.target[:200], exc=error)
            if not request.started:
                await request.answer(500, internal_error().body())

    state = State(limits)
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state), sock=listener, backlog=4096)
    checking = asyncio.ensure_future(_check_deadlines(state))
    try:
        yield
    finally:
        state.closing = True
        with anyio.CancelScope(shield=True):  # the gateway stops by cancelling this task
            await _drain(state.tasks, grace_s, cut_off)
        server.close()
        for connection in list(state.connections):
            connection.transport.close()
        checking.cancel()
