"""A pooled HTTP/1.1 client for inference servers, on asyncio and httptools.

General clients cost more per request than the rest of the gateway together (docs/decisions/gateway.md). The server may
close a pooled connection just as a request goes out on it. If that happens before any byte of a reply came back, the
request is sent once more, on a new connection."""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from rollout_gateway.http.request import header_line
from rollout_gateway.http.upstream_connection import Cutter, Sink, UpstreamConnection
from rollout_gateway.http.upstream_connection import UpstreamError as UpstreamError
from rollout_gateway.http.upstream_connection import UpstreamTimeoutError as UpstreamTimeoutError

_PATH = re.compile(r"[!-~]*")
_TIMEOUT_CHECK_S = 0.25
"""How often timeouts are checked. A timer for each request would cost more than all these checks."""
_CONNECT_S = 10.0
_HEADS = 64
"""Request heads (method and path) that are cached for each server."""
_MAX_IDLE = 1024
"""Connections to one server that are kept for further requests."""


class UpstreamReply:
    """A reply whose head has come. Read it to its end, or `close` it."""

    def __init__(self, connection: UpstreamConnection, release: Callable[[UpstreamConnection], None]) -> None:
        self._connection, self._release = connection, release
        self._open, self._paused = True, False
        self.status = connection.status

    async def read(self) -> bytes:
        """Return the whole body. Raises `UpstreamError`."""
        try:
            await self._connection.wait_done()
            return self._connection.take()
        finally:
            self.close()

    async def pipe(self, sink: Sink, cutter: Cutter | None = None) -> None:
        """Give the body to `sink` as it arrives, until its end. Where a chunk begins, `cutter` may first consume whole
        chunks. Raises `UpstreamError`, and what `sink` or `cutter` raises."""
        connection = self._connection
        try:
            if data := connection.take():
                sink(data)
            connection.sink, connection.cutter = sink, cutter
            await connection.wait_done()
        finally:
            self.close()

    def flow(self, pause: bool) -> None:
        """Pause or resume reading from the server."""
        connection = self._connection
        if not self._open or pause == self._paused:
            return
        self._paused = pause
        if connection.closed or connection.transport.is_closing():
            return
        if pause:
            connection.transport.pause_reading()
        else:
            connection.transport.resume_reading()

    def close(self) -> None:
        """Release the connection. An incomplete reply is broken off, which tells the server to stop."""
        if self._open:
            self.flow(pause=False)
            self._open = False
            self._release(self._connection)


class Upstream:
    """One server and the connections to it."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _PATH.fullmatch(parts.path):
            raise ValueError(f"{url!r} is no http(s) URL")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = header_line(b"Host", parts.netloc.rpartition("@")[2].encode())
        self._headers += header_line(b"Content-Type", b"application/json")
        if api_key:
            self._headers += header_line(b"Authorization", f"Bearer {api_key}".encode())
        self._heads: dict[tuple[str, str], bytes] = {}
        self._idle: deque[UpstreamConnection] = deque()
        self._all: set[UpstreamConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def _head(self, method: str, path: str, length: int) -> bytes:
        start = self._heads.get((method, path))
        if start is None:
            start = b"%b HTTP/1.1\r\n%b" % (f"{method} {self.prefix}{path}".encode(), self._headers)
            if len(self._heads) < _HEADS:
                self._heads[method, path] = start
        return b"%bContent-Length: %d\r\n\r\n" % (start, length)

    async def request(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 300.0
    ) -> UpstreamReply:
        """Send a request and wait for the head of its reply. The whole reply must have come within `timeout_s` seconds.

        If the caller is cancelled, the connection is closed, which tells the server to stop. Raises `UpstreamError`. If
        that is not `answered`, the caller may send the request again."""
        data = self._head(method, path, len(body)) + body
        deadline, sent = self._loop.time() + timeout_s, False
        if (connection := self._take_idle()) is not None:
            try:
                return await self._exchange(connection, data, deadline)
            except UpstreamTimeoutError:
                raise
            except UpstreamError as error:
                if error.answered:
                    raise
            sent = True
        try:
            connection = await self._connect(deadline - self._loop.time())
        except UpstreamError as error:
            error.sent = sent
            raise
        return await self._exchange(connection, data, deadline)

    async def _exchange(self, connection: UpstreamConnection, data: bytes, deadline: float) -> UpstreamReply:
        """Send a request on a connection and wait for the head of its reply. Raises `UpstreamError`."""
        connection.send(data, deadline)
        if self._timer is None:
            self._timer = self._loop.call_later(_TIMEOUT_CHECK_S, self._check_timeouts)
        try:
            await connection.wait_head()
        except BaseException:
            self._release(connection)
            raise
        return UpstreamReply(connection, self._release)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 10.0
    ) -> tuple[int, bytes]:
        """Send a request. Returns status and body of the reply. Raises `UpstreamError`."""
        reply = await self.request(method, path, body, timeout_s=timeout_s)
        return reply.status, await reply.read()

    def _take_idle(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and not connection.transport.is_closing():
                connection.reset()
                return connection
        return None

    async def _connect(self, timeout_s: float) -> UpstreamConnection:
        # A lost connection that is idle is dropped when it is taken out of `_idle`. Searching for it would take longer.
        try:
            async with asyncio.timeout(min(timeout_s, _CONNECT_S)):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self._all.discard), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise UpstreamError(f"{self.url} can't be reached: {why}", answered=False, sent=False) from error
        self._all.add(connection)
        return connection

    def _release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for further requests, or close it if it can't be used again."""
        connection.deadline = math.inf
        connection.sink = connection.cutter = None
        usable = (
            connection.done and connection.keep_alive and not connection.closed and connection.error is None
        )
        if usable and len(self._idle) < _MAX_IDLE:
            connection.answered = False
            self._idle.append(connection)
        else:
            connection.close()

    def _check_timeouts(self) -> None:
        now, self._timer = self._loop.time(), None
        busy = False
        for connection in list(self._all):
            if connection.deadline < now:
                connection.expire()
            busy = busy or connection.deadline < math.inf
        if busy:
            self._timer = self._loop.call_later(_TIMEOUT_CHECK_S, self._check_timeouts)

    def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._all):
            connection.close()
        self._idle.clear()
