"""The HTTP/1.1 server.

It is written on asyncio and httptools. A general server and its interface cost as much per call as capture does
(docs/decisions/gateway.md). TLS and HTTP/2 are left to a reverse proxy.

One connection answers one request at a time. What a client sends ahead waits. When a client goes away, `Request.gone`
is set and `Request.cancellation` is cancelled. The handler itself runs on, since it may have something to record.

`admit` is called for every request when its head is complete and before its body is read. The handler gets refused
requests too, with `Request.refusal`, and answers them in the format of its API."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from pipeline.config import HttpConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.connection import Admit, Connection, Handler
from rollout_gateway.http.pool import ConnectionPool
from rollout_gateway.http.request import Request

log = get_logger("rollout_gateway.http.server")

_CHECK_S = 1.0
_CUT_OFF_S = 10.0
"""How long a call that was cut off may take to be recorded and answered."""


def _admit_all(_: Request) -> None:
    """Refuse no request."""


def _nothing() -> None:
    """There is nothing to cut off."""


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
    admit: Admit = _admit_all,
    cut_off: Callable[[], None] = _nothing,
) -> AsyncIterator[ConnectionPool[Connection]]:
    """Answer requests on `listener` with `handler` while the block runs.

    When the block is left, running handlers have `grace_s` seconds to end. Then `cut_off` is called, which has to end
    them. Meanwhile new requests still reach the handler. A body larger than `limits.max_body_bytes` is not read:
    `Request.too_large` is set. Yields the server's connections."""
    loop = asyncio.get_running_loop()
    pool: ConnectionPool[Connection] = ConnectionPool(limits)

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
