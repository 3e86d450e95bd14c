"""A pooled HTTP/1.1 client for inference servers: just what a proxy needs, on asyncio and httptools.

General clients cost more per request than the rest of the gateway together. One
`Upstream` is one server. A pooled connection may be closed by the server as a request goes out on it; where that
happens before a byte of the reply came back, the request is sent again on a fresh connection.

Errors: `UpstreamError`; `answered` says whether any byte of a reply had come.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

_SWEEP_S = 0.25
"""How often timeouts are looked for: a timer for each request would cost more than all of them together."""

Sink = Callable[[bytes], None]
Cutter = Callable[[bytes], int]
"""Is given bytes that begin with a chunk of the chunked coding; says how many it took, which are whole chunks."""


class UpstreamError(Exception):
    """The server could not be reached or broke off; `answered` if part of a reply had come, `sent` if the request had
    gone out to it."""

    def __init__(self, message: str, *, answered: bool, sent: bool = True) -> None:
        super().__init__(message)
        self.answered, self.sent = answered, sent


class UpstreamTimeoutError(UpstreamError):
    """The reply was not complete in time."""


class _Connection(asyncio.Protocol):
    """One connection; serves one request at a time and parses its reply."""

    def __init__(self, pool: Upstream) -> None:
        self.pool = pool
        self.loop = pool.loop
        self.parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.reused = False
        self.closed = False
        self.error: Exception | None = None
        self.deadline = math.inf
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.sink: Sink | None = None
        self.cutter: Cutter | None = None
        self.between = False
        """All that came of a chunked body are whole chunks, and it has not ended."""
        self.keep_alive = False
        self.answered = False
        self.head_done = False
        self.done = False
        self.waiter: asyncio.Future[None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        if not self.answered:
            if self.deadline == math.inf:
                self.abort("it spoke without being asked")
                return
            self.answered = True
        elif self.between and self.cutter is not None:
            try:
                taken = self.cutter(data)
            except Exception as error:  # noqa: BLE001 - the reader's own: raised where it waits
                self.error = error
                self.close()
                self._wake()
                return
            if taken == len(data):
                return
            data = data[taken:]
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"its reply is not HTTP: {error}")
            return
        # What has begun of a next chunk's size does not end with a line; once the line is there, the parser has told.
        self.between = self.between and data.endswith(b"\r\n")
        if self.sink is None:
            self._wake()
            return
        if self.body:
            try:
                self.sink(self.take())
            except Exception as error:  # noqa: BLE001 - the reader's own: raised where it waits
                self.error = error
                self.close()
        if self.done or self.error is not None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.done and self.error is None:
            self.error = UpstreamError(f"the connection broke: {exc or 'closed'}", answered=self.answered)
        self.pool._lost(self)
        self._wake()

    # -- httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.head_done = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_chunk_header(self) -> None:
        self.between = False

    def on_chunk_complete(self) -> None:
        self.between = True

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim reply, such as 100 Continue
            self.head_done = False
            self.headers.clear()
            return
        self.done, self.between = True, False
        self.keep_alive = self.parser.should_keep_alive()  # the parser forgets it after this

    # -- one exchange

    def send(self, data: bytes, timeout_s: float) -> None:
        assert self.transport is not None
        self.deadline = self.loop.time() + timeout_s
        self.transport.write(data)

    def expire(self) -> None:
        if self.done:
            return
        self.error = UpstreamTimeoutError("the reply was not complete in time", answered=self.answered)
        self.close()
        self._wake()

    def abort(self, why: str) -> None:
        if self.error is None and not self.done:
            self.error = UpstreamError(why, answered=self.answered)
        self.close()
        self._wake()

    def break_off(self) -> None:
        if not self.done:
            self.reused = False
            self.abort("the client went away")

    def close(self) -> None:
        if self.transport is not None and not self.closed:
            self.closed = True
            self.transport.abort()

    def _wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until something arrived; raises what went wrong."""
        self.waiter = self.loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def finish(self) -> None:
        """Give the connection back, or close it where it can't be used again."""
        self.deadline = math.inf
        self.sink = self.cutter = None
        self.pool._done(self)

    def take(self) -> bytes:
        """What has arrived of the body and was not taken yet."""
        body = self.body
        if not body:
            return b""
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        return data


class UpstreamReply:
    """A reply whose head has come. Read it to its end or `close` it."""

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection | None = connection
        self._stopped = False
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def read(self) -> bytes:
        """The whole body."""
        connection = self._connection
        if connection is None:
            return b""
        try:
            while not connection.done:
                if connection.error is not None:
                    raise connection.error
                await connection.wait()
            return connection.take()
        finally:
            self.close()

    async def pipe(self, sink: Sink, cutter: Cutter | None = None) -> None:
        """Give each piece of the body to `sink` as it arrives, until its end; what `sink` raises ends it too.

        `cutter` is asked first, wherever a chunk begins, and `sink` is given what it leaves."""
        connection = self._connection
        if connection is None:
            return
        try:
            if data := connection.take():
                sink(data)
            connection.sink, connection.cutter = sink, cutter
            while not connection.done or connection.error is not None:
                if connection.error is not None:
                    raise connection.error
                await connection.wait()
        finally:
            self.close()

    def flow(self, stop: bool) -> None:
        """Stop reading from the server, where the reader is slower than it, or go on."""
        connection = self._connection
        if connection is None or connection.transport is None or stop == self._stopped:
            return
        self._stopped = stop
        if connection.closed or connection.transport.is_closing():
            return
        if stop:
            connection.transport.pause_reading()
        else:
            connection.transport.resume_reading()

    def close(self) -> None:
        """Let go of the connection; an unfinished reply is broken off, which tells the server to stop."""
        connection = self._connection
        if connection is not None:
            self.flow(stop=False)
            self._connection = None
            connection.finish()


class Upstream:
    """One server and its idle connections. `on_lost` is called when a connection breaks, which often means a restart."""

    def __init__(self, url: str, *, api_key: str = "", max_idle: int = 1024) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http(s) URL")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2].encode()
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._authorization = f"Authorization: Bearer {api_key}\r\n".encode() if api_key else b""
        self._max_idle = max_idle
        self._heads: dict[tuple[str, str], bytes] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()

    def _head(self, method: str, path: str, length: int, headers: bytes) -> bytes:
        start = self._heads.get((method, path))
        if start is None:
            start = (
                f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: ".encode()
                + self._host_header
                + b"\r\nContent-Type: application/json\r\n"
                + self._authorization
            )
            if len(self._heads) < 64:
                self._heads[method, path] = start
        return b"%bContent-Length: %d\r\n%b\r\n" % (start, length, headers)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: bytes = b"",
        timeout_s: float = 300.0,
        on_sent: Callable[[Callable[[], None]], None] | None = None,
    ) -> UpstreamReply:
        """Send and wait for the head of the reply. `headers`: further ones, each ended by CRLF. `on_sent` is given a
        function that breaks the exchange off, which the server takes as a reason to stop.

        Raises `UpstreamError`; with `answered` false the request may be sent again."""
        data = self._head(method, path, len(body), headers) + body
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)
        sent = False
        while True:
            try:
                connection = self._take_idle() or await self._connect(timeout_s)
            except UpstreamError as error:
                error.sent = sent
                raise
            sent = True
            connection.send(data, timeout_s)
            if on_sent is not None:
                on_sent(connection.break_off)
            try:
                while not connection.head_done:
                    if connection.error is not None:
                        raise connection.error
                    await connection.wait()
            except UpstreamError as error:
                connection.finish()
                if connection.reused and not error.answered and not isinstance(error, UpstreamTimeoutError):
                    continue  # the server closed an idle connection just as we used it
                raise
            except BaseException:
                connection.finish()
                raise
            return UpstreamReply(connection)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 10.0
    ) -> tuple[int, bytes]:
        """Status and whole body."""
        reply = await self.request(method, path, body, timeout_s=timeout_s)
        return reply.status, await reply.read()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            assert connection.transport is not None
            if not connection.closed and not connection.transport.is_closing():
                connection.reused = True
                connection._reset()
                return connection
        return None

    async def _connect(self, timeout_s: float) -> _Connection:
        try:
            async with asyncio.timeout(min(timeout_s, 10.0)):
                _, connection = await self.loop.create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise UpstreamError(f"{self.url} can't be reached: {why}", answered=False, sent=False) from error
        self._all.add(connection)
        return connection

    def _done(self, connection: _Connection) -> None:
        keep = (
            connection.done
            and not connection.closed
            and connection.error is None
            and connection.keep_alive
            and len(self._idle) < self._max_idle
        )
        if keep:
            connection.answered = False
            self._idle.append(connection)
        else:
            connection.close()

    def _lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        # An idle one is dropped when it is taken out; removing it here would cost a search.

    def _sweep(self) -> None:
        now, self._sweeper = self.loop.time(), None
        busy = False
        for connection in list(self._all):
            if connection.deadline < now:
                connection.expire()
            busy = busy or connection.deadline < math.inf
        if busy:
            self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._all):
            connection.close()
        self._idle.clear()
