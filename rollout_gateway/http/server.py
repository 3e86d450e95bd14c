"""The HTTP/1.1 server: requests whose bodies are whole, answered at once or as a stream.

On asyncio and httptools, with nothing between a connection and the gateway's own code: a general server and its
interface cost as much per call as capture does (docs/decisions/0006). TLS and HTTP/2 are a reverse proxy's.

One connection answers one request at a time; what a client sends ahead waits. A client that goes away is noticed at
once: `Request.gone` is set and `Request.on_gone` called, and the handler runs on, since there may be something to record.

`admit` is asked about every request when its head has come, before its body is read. The handler gets refused requests
too, with `Request.refusal`, to answer them in the format of its API.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from pipeline.config import ConfigError, GatewayConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.connection import Connection
from rollout_gateway.http.request import HeaderList as HeaderList
from rollout_gateway.http.request import Headers as Headers
from rollout_gateway.http.request import Request as Request

log = get_logger("rollout_gateway.http.server")

_DEFAULTS = GatewayConfig()
_SWEEP_S = 1.0
_CUT_S = 10.0
"""How long a call that was cut off may take to be recorded and answered."""
_OTHER_FILES = 128
"""File descriptors that the process needs for anything but connections."""

Handler = Callable[[Request], Awaitable[None]]
Admit = Callable[[Request], None]
"""Raises `ApiError` for a request that is refused by its head."""


def _nothing() -> None:
    """Nothing is to be cut off."""


def _everyone(_: Request) -> None:
    """No request is refused by its head."""


@dataclass(frozen=True)
class Limits:
    """What a client may take of the server; the settings of the same names say more."""

    max_body: int = _DEFAULTS.max_body_bytes
    max_buffered: int = _DEFAULTS.max_buffered_bytes
    max_connections: int = _DEFAULTS.max_connections
    head_s: float = _DEFAULTS.head_timeout_s
    body_s: float = _DEFAULTS.body_timeout_s
    idle_s: float = _DEFAULTS.idle_timeout_s
    write_s: float = _DEFAULTS.write_timeout_s

    @classmethod
    def of(cls, config: GatewayConfig) -> Limits:
        """The settings, with no more connections than the process can have open: each may need one to an inference
        server too. Raises `ConfigError` where one body could be larger than all may be together."""
        if config.max_buffered_bytes < config.max_body_bytes:
            raise ConfigError(
                f"gateway.max_buffered_bytes ({config.max_buffered_bytes}) is less than gateway.max_body_bytes "
                f"({config.max_body_bytes}): no request of that size could come in"
            )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        most = max(1, (soft - _OTHER_FILES) // 2)
        if soft != resource.RLIM_INFINITY and most < config.max_connections:
            log.warning("fewer connections than gateway.max_connections", connections=most, open_files=soft)
        else:
            most = config.max_connections
        return cls(
            max_body=config.max_body_bytes,
            max_buffered=config.max_buffered_bytes,
            max_connections=most,
            head_s=config.head_timeout_s,
            body_s=config.body_timeout_s,
            idle_s=config.idle_timeout_s,
            write_s=config.write_timeout_s,
        )


class Server:
    """Answers on one socket; make it with `serving`."""

    def __init__(self, handler: Handler, limits: Limits, admit: Admit) -> None:
        self.handler, self.limits, self.admit = handler, limits, admit
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Connections without a request, the one that has been so longest first."""
        self.reading: dict[Connection, None] = {}
        """Connections whose request is not whole yet, the oldest first."""
        self.buffered = 0
        """Bytes of the bodies that are not whole yet."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    # -- connections

    def admit_connection(self, connection: Connection) -> bool:
        """Take a new connection in. Where there are too many, the oldest idle one goes, else the oldest whose request is
        not whole. False where all are being answered."""
        if len(self.connections) >= self.limits.max_connections:
            oldest = next(iter(self.idle), None) or next(iter(self.reading), None)
            if oldest is None:
                return False
            self.forget(oldest)
            oldest.deaf = True
            oldest.transport.abort()
        self.connections.add(connection)
        self.idle[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        self.reading.pop(connection, None)

    def reads(self, connection: Connection) -> None:
        """A request begins to come."""
        self.idle.pop(connection, None)
        if connection.active is None:
            self.reading[connection] = None

    def answers(self, connection: Connection) -> None:
        """A request is whole."""
        self.idle.pop(connection, None)
        self.reading.pop(connection, None)

    def idles(self, connection: Connection) -> None:
        """A request is answered."""
        (self.idle if connection.request is None else self.reading)[connection] = None

    def make_room(self) -> None:
        """Refuse the requests that began last until the bodies that are not whole fit `limits.max_buffered` again."""
        for connection in list(reversed(self.reading)):
            if self.buffered <= self.limits.max_buffered:
                return
            if connection.held:
                connection.refuse_body()

    # -- time

    async def _sweep(self) -> None:
        limits = self.limits
        every = min(_SWEEP_S, limits.head_s / 4, limits.body_s / 4, limits.idle_s / 4, limits.write_s / 4)
        while True:
            await asyncio.sleep(every)
            now = self.loop.time()
            for connection in list(self.connections):
                connection.sweep(now)

    async def _drain(self, grace_s: float, cut_off: Callable[[], None]) -> None:
        """Until running requests have ended, or were cut off after `grace_s`. New ones are still read: the handler refuses
        them."""
        self.closing = True
        if await self._running(grace_s):
            log.warning("calls are cut off", calls=len(self.tasks))
            cut_off()
            for task in await self._running(_CUT_S):
                task.cancel()
            await self._running(_CUT_S)

    async def _running(self, wait_s: float) -> list[asyncio.Task[None]]:
        """The requests that still run after `wait_s`. Returns as soon as none does."""
        until = self.loop.time() + wait_s
        while self.tasks and (left := until - self.loop.time()) > 0:
            await asyncio.wait(list(self.tasks), timeout=left)
        return list(self.tasks)

    def _close(self) -> None:
        for connection in list(self.connections):
            connection.transport.close()


@asynccontextmanager
async def run_server(
    handler: Handler,
    listener: socket.socket,
    limits: Limits = Limits(),
    *,
    grace_s: float,
    admit: Admit = _everyone,
    cut_off: Callable[[], None] = _nothing,
) -> AsyncIterator[Server]:
    """`handler` answers on `listener` while the block runs. Before it is left, running calls have `grace_s` to end;
    `cut_off` is to end what runs after that. Meanwhile new requests still reach the handler.

    A body larger than `limits.max_body` is not read, and `Request.too_large` says so."""
    server = Server(handler, limits, admit)
    listening = await server.loop.create_server(lambda: Connection(server), sock=listener, backlog=4096)
    sweeping = asyncio.ensure_future(server._sweep())
    try:
        yield server
    finally:
        with anyio.CancelScope(
            shield=True
        ):  # also where this task is cancelled: that is how the gateway stops
            await server._drain(grace_s, cut_off)
        listening.close()
        server._close()
        sweeping.cancel()
