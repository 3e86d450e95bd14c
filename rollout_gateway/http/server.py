"""The HTTP/1.1 server.

It is written on asyncio and httptools. A general server and its interface cost as much per call as capture does
(docs/decisions/gateway.md). TLS and HTTP/2 are left to a reverse proxy.

One connection answers one request at a time. What a client sends ahead waits. When a client goes away, `Request.gone`
is set and `Request.cancellation` is cancelled. The handler itself runs on, since it may have something to record.

`admit` is called for every request when its head is complete and before its body is read. The handler gets refused
requests too, with `Request.refusal`, and answers them in the format of its API."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from pipeline.config import ConfigError, HttpConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.connection import Admit, Connection, ConnectionPool, Handler

log = get_logger("rollout_gateway.http.server")

_CHECK_S = 1.0
_OTHER_FILES = 128
"""File descriptors that the process needs for anything but connections."""
_CUT_OFF_S = 10.0
"""How long a call that was cut off may take to be recorded and answered."""


def checked_limits(config: HttpConfig) -> HttpConfig:
    """Raise the process's limit of open files to its hard limit, and lower `max_connections` to what that allows.

    A client's connection may need another one to an inference server. Raises `ConfigError` if one body may be larger
    than all bodies together."""
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
    log.warning("fewer connections than gateway.http.max_connections", connections=possible, open_files=soft)
    return msgspec.structs.replace(config, max_connections=possible)


async def _check_deadlines(connections: set[Connection], limits: HttpConfig) -> None:
    timeouts = (limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
    pause_s = min(_CHECK_S, *(timeout / 4 for timeout in timeouts))
    while True:
        await asyncio.sleep(pause_s)
        now = asyncio.get_running_loop().time()
        for connection in list(connections):
            connection.check_deadlines(now)


async def _wait(tasks: set[asyncio.Task[None]], wait_s: float) -> list[asyncio.Task[None]]:
    """Wait until no task is left, for at most `wait_s`. Returns those that still run."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while tasks and (left := until - loop.time()) > 0:
        await asyncio.wait(list(tasks), timeout=left)
    return list(tasks)


async def _drain(tasks: set[asyncio.Task[None]], grace_s: float, cut_off: Callable[[], None]) -> None:
    """Wait for running handlers. Cut them off after `grace_s`, and cancel what runs after that."""
    if await _wait(tasks, grace_s):
        log.warning("calls are cut off", calls=len(tasks))
        cut_off()
        for task in await _wait(tasks, _CUT_OFF_S):
            task.cancel()
        await _wait(tasks, _CUT_OFF_S)


@asynccontextmanager
async def run_server(
    handler: Handler,
    listener: socket.socket,
    limits: HttpConfig,
    *,
    grace_s: float,
    admit: Admit,
    cut_off: Callable[[], None],
) -> AsyncIterator[ConnectionPool]:
    """Answer requests on `listener` with `handler` while the block runs.

    When the block is left, running handlers have `grace_s` seconds to end. Then `cut_off` is called, which has to end
    them. Meanwhile new requests still reach the handler. A body larger than `limits.max_body_bytes` is not read:
    `Request.too_large` is set. Yields the server's connections."""
    loop = asyncio.get_running_loop()
    pool = ConnectionPool(limits)

    def connect() -> Connection:
        return Connection(pool, handler, admit)

    server = await loop.create_server(connect, sock=listener, backlog=4096)
    checking = asyncio.ensure_future(_check_deadlines(pool.connections, limits))
    try:
        yield pool
    finally:
        pool.closing = True
        with anyio.CancelScope(shield=True):  # the gateway stops by cancelling this task
            await _drain(pool.tasks, grace_s, cut_off)
        server.close()
        for connection in list(pool.connections):
            connection.transport.close()
        checking.cancel()
