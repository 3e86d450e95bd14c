"""Clients' connections: each reads requests, has them answered one at a time, and enforces deadlines; all of a server
have limits together."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import cast

from pipeline.config import HttpConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError, ClientGoneError, internal_error
from rollout_gateway.http.parser import RequestParser
from rollout_gateway.http.request import Request, ignore_flow

log = get_logger("rollout_gateway.http.server")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_AHEAD_LIMIT = 65536
"""Bytes a client may send ahead of an answer before reading from it pauses."""
_DISCARD_LIMIT = 65536
"""Bytes of a refused request's body that are read, so that its connection can be used again."""
_WRITE_HIGH = 262144
"""Bytes an answer may have waiting for a slow client before its source pauses."""
_LINGER_S = 2.0
"""How long a client that is still sending has to read why it was refused."""
_BODY_RATE = 65536
"""Bytes of a body for which a client has one more second."""

Handler = Callable[[Request], Awaitable[None]]
Admit = Callable[[Request], None]
"""Decides by a request's head whether it is refused. Raises `ApiError` if it is."""


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, pool: ConnectionPool, handler: Handler, admit: Admit) -> None:
        self._pool, self._handler, self._admit = pool, handler, admit
        self._loop = asyncio.get_running_loop()
        self.transport = cast(asyncio.Transport, None)  # until `connection_made`
        self.ignoring = False
        """Further input is thrown away."""
        self.buffered = 0
        """Bytes of its incomplete body that are counted in `ConnectionPool.buffered`."""
        self.owner = ""
        """The name of the API key that sends that body."""
        self._parser = RequestParser(self)
        self._active: Request | None = None
        """The request that is being answered."""
        self._queued: deque[Request] = deque()
        """Complete requests that wait for their turn."""
        self._unparsed = bytearray()
        """Input that came ahead of an answer."""
        self._paused = False
        """Reading from the client is paused."""
        self._fresh = True
        """No request has come yet."""
        self._closing_at = 0.0
        self._heard_at = self._began_at = self._loop.time()
        """`_began_at`: since when the connection is idle, or the current head or body has been coming."""
        self._unsent, self._unsent_at = 0, 0.0
        """Bytes that wait for a slow client, and since when it has taken none of them."""

    @property
    def closing(self) -> bool:
        return self._pool.closing

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_WRITE_HIGH)
        if not self._pool.add(self):
            message = "The gateway has reached gateway.http.max_connections. Try again."
            self.reject(ApiError(503, "too_many_connections", message, retry_after_s=1))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        self._uncount_body()
        self.ignoring = True
        self._queued.clear()
        self._unparsed.clear()
        self._parser.reset()
        active, self._active = self._active, None
        if active is not None:
            active.gone = True
            active.cancellation.cancel(ClientGoneError())
            active.on_flow = ignore_flow

    def pause_writing(self) -> None:
        if self._active is not None:
            self._active.on_flow(True)

    def resume_writing(self) -> None:
        if self._active is not None:
            self._active.on_flow(False)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self.ignoring:
            return
        if self._active is None:
            self._feed(data)
            return
        self._unparsed += data
        if len(self._unparsed) > _AHEAD_LIMIT and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    # -- reading requests

    def _feed(self, data: bytes) -> None:
        self._parser.feed(data)
        if self._parser.parts and not self.ignoring:  # empty where the body came in one piece
            self._pool.count_body(self, self._parser.size)

    def _uncount_body(self) -> None:
        if self.buffered:
            self._pool.count_body(self, 0)

    def new_request(self) -> Request:
        self._began_at = self._heard_at
        if self._active is None:
            self._pool.set_reading(self)
        return Request(self, self._pool.limits.max_body_bytes)

    def head_complete(self, request: Request) -> None:
        self._fresh, self._began_at = False, self._heard_at
        try:
            self._admit(request)
        except ApiError as error:
            request.refusal = error
        except Exception as error:  # noqa: BLE001 - a supervision edge, as in `_handle`
            log.error("a request failed", target=request.target[:200], exc=error)
            request.refusal = internal_error()
        if request.refusal is not None:
            request.max_body = min(request.max_body, _DISCARD_LIMIT)
        self.owner = request.owner
        headers = request.headers
        if int(headers.get(b"content-length", b"0")) > request.max_body:
            self._parser.reject_size()
        elif (
            b"expect" in headers
            and headers[b"expect"].lower() == b"100-continue"
            and request.chunked  # HTTP/1.1
            and self._active is None
            and request.refusal is None
        ):
            self.transport.write(_CONTINUE)

    def request_complete(self, request: Request) -> None:
        self._uncount_body()
        if self._active is None:
            self._begin(request)
        else:
            self._queued.append(request)

    def reject(self, error: ApiError) -> None:
        if self.ignoring:
            return
        self.ignoring = True
        self._parser.parts = []
        self._uncount_body()
        if self._active is None:  # else the connection ends with the answer to that request
            self._active = request = Request(self, 0)
            request.answer(error.status, error.body(), error.headers)

    def reject_body(self) -> None:
        """Refuse the request whose body is being read."""
        message = "All requests being sent together exceed gateway.http.max_buffered_bytes. Try again."
        self.reject(ApiError(503, "too_many_bodies", message, retry_after_s=1))

    # -- answering

    def _begin(self, request: Request) -> None:
        self._active = request
        self._pool.set_answering(self)
        if self._pool.closing:
            request.keep_alive = False
        self._pool.tasks.add(self._loop.create_task(self._handle(request)))

    async def _handle(self, request: Request) -> None:
        try:
            await self._handler(request)
        except Exception as error:  # noqa: BLE001 - a supervision edge: a request's fault does not end the service
            log.error("a request failed", target=request.target[:200], exc=error)
            if not request.started:
                request.answer(500, internal_error().body())
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._pool.tasks.discard(task)
            if self._active is request:  # the handler ended in the middle of its answer
                self.transport.abort()
            elif self._active is None:
                self._continue()

    def answered(self, request: Request) -> None:
        self._active = None
        self._began_at = self._loop.time()
        request.on_flow = ignore_flow
        if request.keep_alive and not self._pool.closing and not (self.ignoring and not self._queued):
            if self._parser.request is None:
                self._pool.set_idle(self)
            else:
                self._pool.set_reading(self)
            return
        self._queued.clear()
        if self.ignoring and not self.transport.is_closing():
            # The client may still be sending. If we closed now, a reset could discard the answer before it is read.
            self._closing_at = self._loop.time() + _LINGER_S
            self.transport.write_eof()
        else:
            self.ignoring = True
            self.transport.close()

    def _continue(self) -> None:
        """Begin the next queued request, or parse the input that came ahead."""
        if self._queued:
            self._begin(self._queued.popleft())
            return
        if self.ignoring:
            return
        if self._unparsed:
            data = bytes(self._unparsed)
            self._unparsed.clear()
            self._heard_at = self._loop.time()
            self._feed(data)
        if self._paused and len(self._unparsed) <= _AHEAD_LIMIT and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # -- deadlines

    def abort(self) -> None:
        """Close the connection at once and ignore further input."""
        self.ignoring = True
        self.transport.abort()

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client has been silent or slow for too long. `now` is the loop's time."""
        limits = self._pool.limits
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_at = unsent, now
        elif now - self._unsent_at > limits.write_timeout_s:
            self.transport.abort()
            return
        if self._closing_at:
            if now > self._closing_at:
                self.transport.abort()
        elif self._active is None:
            self._check_reading(now - self._began_at)

    def _check_reading(self, took_s: float) -> None:
        limits, parser = self._pool.limits, self._parser
        if parser.request is None:
            if took_s > (limits.head_timeout_s if self._fresh else limits.idle_timeout_s):
                self.transport.close()
        elif not parser.head_done:
            if took_s > limits.head_timeout_s:
                message = f"The headers did not arrive within {limits.head_timeout_s:g} s."
                self.reject(ApiError(408, "request_timeout", message))
        elif took_s > limits.body_timeout_s + parser.size / _BODY_RATE:
            allowed = f"{limits.body_timeout_s:g} s plus one second per {_BODY_RATE} bytes"
            message = f"The body did not arrive within {allowed}."
            self.reject(ApiError(408, "request_timeout", message))


class ConnectionPool:
    """The connections of one server by state (idle, reading a request, or answering one), and the limits that hold for
    all of them together."""

    def __init__(self, limits: HttpConfig) -> None:
        self.limits = limits
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """The handlers that run."""
        self.closing = False
        """The server stops: every connection ends with its next answer."""
        self.buffered = 0
        """Bytes of all incomplete bodies."""
        self._idle: dict[Connection, None] = {}
        """Connections without a request, longest idle first."""
        self._reading: dict[Connection, None] = {}
        """Connections with an incomplete request, oldest first."""

    def add(self, connection: Connection) -> bool:
        """Add a new connection. At the limit, close the longest idle connection for it, or else the one that has been
        reading a request longest. Returns false if all connections are being answered."""
        if len(self.connections) >= self.limits.max_connections:
            oldest = next(iter(self._idle), None) or next(iter(self._reading), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.abort()
        self.connections.add(connection)
        self._idle[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.set_answering(connection)

    def set_idle(self, connection: Connection) -> None:
        self._idle[connection] = None

    def set_reading(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._reading[connection] = None

    def set_answering(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._reading.pop(connection, None)

    def count_body(self, connection: Connection, size: int) -> None:
        """Count `size` bytes for the incomplete body of `connection`. While all incomplete bodies together exceed
        `limits.max_buffered_bytes`, refuse the newest request of the owner whose bodies are the largest together: an
        owner that fills the limit with bodies that never end holds up itself."""
        self.buffered += size - connection.buffered
        connection.buffered = size
        for _ in range(len(self._reading)):
            if self.buffered <= self.limits.max_buffered_bytes:
                return
            sums: Counter[str] = Counter()
            newest: dict[str, Connection] = {}
            for reading in self._reading:
                if reading.buffered:
                    sums[reading.owner] += reading.buffered
                    newest[reading.owner] = reading
            if not sums:
                return
            newest[sums.most_common(1)[0][0]].reject_body()
