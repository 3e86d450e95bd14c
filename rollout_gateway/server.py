"""The HTTP/1.1 server: requests whose bodies are whole, answered at once or as a stream.

On asyncio and httptools, with nothing between a connection and the gateway's own code: a general server and its
interface cost as much per call as capture does (docs/decisions/0006). TLS and HTTP/2 are a reverse proxy's.

One connection answers one request at a time; what a client sends ahead waits. A client that goes away is noticed at
once: `Request.gone` is set and `Request.on_gone` called, and the handler runs on, since there may be something to record.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import cast

import anyio
import httptools

from pipeline.log import get_logger
from rollout_gateway.errors import error_body

log = get_logger("rollout_gateway.server")

Headers = dict[bytes, bytes]
HeaderList = Iterable[tuple[bytes, bytes]]

_HEAD_LIMIT = 65536
_AHEAD_LIMIT = 65536
"""Bytes a client may send ahead of an answer before reading from it pauses."""
_WRITE_HIGH = 262144
"""Bytes an answer may have waiting for a slow client before its source pauses."""
_IDLE_S = 600.0
"""Clients keep connections too, and one that is closed as a request goes out on it fails that request."""
_READ_S = 60.0
"""How long a request that has begun may go without a further byte."""
_LINGER_S = 2.0
"""How long a client that is still sending gets to read why it was refused."""
_SWEEP_S = 1.0

_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_JSON_200 = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def _nothing() -> None:
    pass


def _ignored(_: bool) -> None:
    pass


class Request:
    """A request and the way to answer it: `answer`, or `start`, `write` and `end`."""

    __slots__ = (
        "_connection", "_length", "_plain", "body", "gone", "headers", "keep_alive", "method", "on_flow", "on_gone",
        "started", "target", "too_large",
    )  # fmt: skip

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.method = ""
        self.target = ""
        """Path and query as they came."""
        self.headers: Headers = {}
        """Names in lower case; of a repeated one the last."""
        self.body = b""
        self.too_large = False
        """The body is larger than allowed and was not read."""
        self.keep_alive = False
        self.gone = False
        """The client closed its connection."""
        self.started = False
        """An answer has begun."""
        self.on_gone: Callable[[], None] = _nothing
        self.on_flow: Callable[[bool], None] = _ignored
        """Called with true where the client takes a stream too slowly, with false when it may go on."""
        self._plain = False
        """HTTP/1.0 knows no chunks: such a stream ends with its connection."""

    @property
    def server(self) -> str:
        """`host:port` that the client reached."""
        host, port = self._connection.transport.get_extra_info("sockname")[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def answer(
        self, status: int, body: bytes, headers: HeaderList = (), content_type: bytes = b"application/json"
    ) -> None:
        """The whole answer."""
        self.started = True
        if self._lost():
            return
        if status == 200 and self.keep_alive and not headers and content_type == b"application/json":
            head = _JSON_200 % len(body)
        else:
            head = self._head(
                status, ((b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers)
            )
        connection = self._connection
        connection.transport.write(head if self.method == "HEAD" else head + body)
        connection.answered(self)

    def start(self, status: int, headers: HeaderList) -> None:
        """The head of a streamed answer."""
        self.started = True
        if self._lost():
            return
        if self._plain:
            self.keep_alive = False
        else:
            headers = (*headers, (b"transfer-encoding", b"chunked"))
        self._connection.transport.write(self._head(status, headers))

    def write(self, data: bytes) -> None:
        """A piece of a streamed answer."""
        if data and not self._lost():
            self._connection.transport.write(data if self._plain else b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def chunked(self) -> bool:
        """Whether a stream's pieces go out in HTTP's chunked coding."""
        return not self._plain

    def write_chunks(self, data: bytes) -> None:
        """Pieces of a streamed answer that are in chunked coding already."""
        if not self._lost():
            self._connection.transport.write(data)

    def end(self) -> None:
        """The end of a streamed answer."""
        if not self._lost():
            if not self._plain:
                self._connection.transport.write(b"0\r\n\r\n")
            self._connection.answered(self)

    def _lost(self) -> bool:
        """Nothing can be said any more; the connection may have broken a moment before `gone` is told."""
        return self.gone or self._connection.transport.is_closing()

    async def drain(self) -> None:
        """Until a slow client has taken most of what was written; a stream's own source uses `on_flow`."""
        if self._connection.choked is not None:
            await self._connection.choked.wait()

    def _head(self, status: int, headers: HeaderList) -> bytes:
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


Handler = Callable[[Request], Awaitable[None]]


class _Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = server.loop
        self.transport = cast(asyncio.Transport, None)  # until `connection_made`
        self.parser = httptools.HttpRequestParser(self)
        self.active: Request | None = None
        """The request that is being answered."""
        self.waiting: deque[Request] = deque()
        """Whole requests that came ahead of an answer."""
        self.ahead = bytearray()
        """What came ahead of an answer and was not parsed yet."""
        self.choked: asyncio.Event | None = None
        """Set once the client has taken what waits for it; none: nothing waits."""
        self.paused = False
        self.deaf = False
        """Nothing more is read: what comes is thrown away."""
        self.closing_at = 0.0
        self.heard_at = self.loop.time()
        self._reset()

    def _reset(self) -> None:
        self.request: Request | None = None
        """The request that is being read."""
        self.parts: list[bytes] = []
        self.size = 0
        self.head_size = 0
        self.head_done = False
        self.url = b""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_WRITE_HIGH)
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.deaf = True
        self.waiting.clear()
        self.ahead.clear()
        self.request = None
        self._unchoke()
        active, self.active = self.active, None
        if active is not None:
            active.gone = True
            active.on_gone()
            active.on_gone, active.on_flow = _nothing, _ignored

    def pause_writing(self) -> None:
        self.choked = asyncio.Event()
        if self.active is not None:
            self.active.on_flow(True)

    def resume_writing(self) -> None:
        self._unchoke()
        if self.active is not None:
            self.active.on_flow(False)

    def _unchoke(self) -> None:
        choked, self.choked = self.choked, None
        if choked is not None:
            choked.set()

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.loop.time()
        if self.deaf:
            return
        if self.active is None:
            self._feed(data)
            return
        self.ahead += data
        if len(self.ahead) > _AHEAD_LIMIT and not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        if not self.head_done:
            self.head_size += len(data)
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is spoken here; the request itself is answered as any other.
                self.parser = httptools.HttpRequestParser(self)
                data = data[upgrade.args[0] :]
                if data:
                    continue
            except httptools.HttpParserError:
                self._refuse(400, "This is not HTTP/1.1.", "bad_http")
                return
            break
        if self.head_size > _HEAD_LIMIT and self.request is not None and not self.head_done:
            self._refuse(431, f"The headers are longer than {_HEAD_LIMIT} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer what never became a request, after those before it."""
        if self.deaf:
            return
        self.deaf = True
        if self.active is not None:
            return  # it is answered, then the connection ends
        request = Request(self)
        self.active = request
        request.answer(status, error_body(message, "invalid_request_error", code))

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        self.request = Request(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.request is not None
        self.request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        request, parser = self.request, self.parser
        assert request is not None
        self.head_done = True
        request.method = parser.get_method().decode("latin-1")
        request.target = self.url.decode("latin-1")
        if not request.target.startswith("/"):  # the form that is meant for proxies
            request.target = "/" + request.target.partition("://")[2].partition("/")[2]
        version = parser.get_http_version()
        request.keep_alive = parser.should_keep_alive()
        request._plain = version == "1.0"
        headers = request.headers
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.server.max_body:
            self._too_large(request)
        elif (
            headers.get(b"expect", b"").lower() == b"100-continue"
            and version != "1.0"
            and self.active is None
        ):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request is None or self.deaf:
            return
        self.parts.append(body)
        self.size += len(body)
        if self.size > self.server.max_body:
            self._too_large(request)

    def on_message_complete(self) -> None:
        request = self.request
        if request is None or self.deaf:
            return
        parts = self.parts
        if parts:
            request.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._reset()
        self._take(request)

    def _too_large(self, request: Request) -> None:
        request.too_large, request.keep_alive = True, False
        self.deaf = True
        self.parts.clear()
        self._take(request)

    # -- answering

    def _take(self, request: Request) -> None:
        if self.active is None:
            self._begin(request)
        else:
            self.waiting.append(request)

    def _begin(self, request: Request) -> None:
        self.active = request
        if self.server.closing:
            request.keep_alive = False
        self.server.tasks.add(self.loop.create_task(self._handle(request)))

    async def _handle(self, request: Request) -> None:
        try:
            await self.server.handler(request)
        except Exception as error:  # noqa: BLE001 - the edge of supervision: one request's fault is not the service's
            log.error("a request failed", target=request.target[:200], exc=error)
            if not request.started:
                message = "The gateway failed: its log says why."
                request.answer(500, error_body(message, "api_error", "internal_error"))
        finally:
            task = asyncio.current_task()
            assert task is not None
            self.server.tasks.discard(task)
            if self.active is request:  # the handler gave up in mid-answer
                self.transport.abort()
            elif self.active is None:
                self._go_on()

    def answered(self, request: Request) -> None:
        """The answer is written."""
        self.active = None
        request.on_gone, request.on_flow = _nothing, _ignored
        if request.keep_alive and not self.server.closing and not (self.deaf and not self.waiting):
            return
        self.waiting.clear()
        if self.deaf and not self.transport.is_closing():
            # The client may still be sending: closing at once would take the answer from it.
            self.closing_at = self.loop.time() + _LINGER_S
            self.transport.write_eof()
        else:
            self.deaf = True
            self.transport.close()

    def _go_on(self) -> None:
        """The next of what came ahead."""
        if self.waiting:
            self._begin(self.waiting.popleft())
            return
        if self.deaf:
            return
        if self.ahead:
            data = bytes(self.ahead)
            self.ahead.clear()
            self._feed(data)
        if self.paused and len(self.ahead) <= _AHEAD_LIMIT and not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Close what was silent for too long."""
        if self.closing_at:
            if now > self.closing_at:
                self.transport.abort()
        elif self.active is None:
            reading = self.request is not None
            if now - self.heard_at > (_READ_S if reading else _IDLE_S):
                if reading:
                    self._refuse(408, f"No byte came for {_READ_S:.0f} s.", "request_timeout")
                else:
                    self.transport.close()


class Server:
    """Answers on one socket; make it with `serving`."""

    def __init__(self, handler: Handler, max_body: int) -> None:
        self.handler, self.max_body = handler, max_body
        self.loop = asyncio.get_running_loop()
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = self.loop.time()
            for connection in list(self.connections):
                connection.sweep(now)

    async def _drain(self, grace_s: float) -> None:
        """Until running requests have ended, or `grace_s` has passed."""
        self.closing = True
        for connection in list(self.connections):
            if connection.active is None:
                connection.transport.close()
        if self.tasks:
            _, late = await asyncio.wait(list(self.tasks), timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                log.warning("calls were cut off", calls=len(late))
                await asyncio.wait(late, timeout=grace_s)
        for connection in list(self.connections):
            connection.transport.close()


@asynccontextmanager
async def serving(
    handler: Handler, listener: socket.socket, *, max_body: int, grace_s: float
) -> AsyncIterator[None]:
    """`handler` answers on `listener` while the block runs; running calls end, within `grace_s`, before it is left.

    `max_body`: bytes; a larger body is not read, and `Request.too_large` says so."""
    server = Server(handler, max_body)
    listening = await server.loop.create_server(lambda: _Connection(server), sock=listener, backlog=4096)
    sweeping = asyncio.ensure_future(server._sweep())
    try:
        yield
    finally:
        listening.close()
        with anyio.CancelScope(
            shield=True
        ):  # also where this task is cancelled: that is how the gateway stops
            await server._drain(grace_s)
        sweeping.cancel()
