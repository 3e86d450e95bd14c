"""One HTTP request and its answer, over ASGI; and the bound on the bodies of all requests together.

`connection` makes a `Request` when its head has come, and `server` calls the handler, `app`, with it. The handler
checks the key by the head, reads the body and answers. `State` is what all connections share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from uvicorn.server import ServerState

from pipeline.config import HttpConfig
from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.http.errors import ApiError, ClientGoneError

Headers = dict[bytes, bytes]
HeaderList = Iterable[tuple[bytes, bytes]]
SSE_HEADERS: HeaderList = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
CLOSE = (b"connection", b"close")
JSON = b"application/json"
LINGER_S = 2.0
"""Seconds that a client which is still sending has to read why it was refused."""

_DISCARD_LIMIT = 65536
"""Bytes of a refused request's body that are read, so that its connection can be used again."""
_BODY_RATE = 65536
"""Bytes of a body for which a client has one more second."""


class Bodies:
    """Counts the bytes of all bodies that are arriving, and refuses requests when they are too many together."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._sizes: dict[Request, int] = {}
        """Bytes that have arrived, by request, the oldest first."""

    def count(self, request: Request, size: int) -> None:
        """Note that `size` bytes of the body of `request` have arrived. While all bodies exceed the limit, refuse the
        newest request of the owner (the API key) whose bodies are the largest together: an owner that fills the limit
        with bodies that never end holds up itself."""
        self._total += size - self._sizes.get(request, 0)
        self._sizes[request] = size
        while self._total > self._limit:
            sums: Counter[str] = Counter()
            for reading, part in self._sizes.items():
                sums[reading.owner] += part
            owner = sums.most_common(1)[0][0]
            newest = next(r for r in reversed(self._sizes) if r.owner == owner and self._sizes[r])
            self.remove(newest)
            message = "All requests being sent together exceed gateway.http.max_buffered_bytes. Try again."
            newest.cancellation.cancel(ApiError(503, "too_many_bodies", message, retry_after_s=1))

    def remove(self, request: Request) -> None:
        """Count the body of `request` no more: it is complete, refused or given up."""
        self._total -= self._sizes.pop(request, 0)


class State(ServerState):
    """What the connections of one server share."""

    def __init__(self, limits: HttpConfig) -> None:
        super().__init__()
        self.limits, self.bodies = limits, Bodies(limits.max_buffered_bytes)
        self.closing = False
        """The server stops: every connection ends with its next answer."""


class Request:
    """A request whose head has come. `read` its body, then `answer` it, or `start`, `write` and `end` a stream."""

    receive: Any
    """ASGI's functions for this request, set when its handler begins."""
    send: Any

    def __init__(self, state: State, method: str, target: str, headers: Headers, version: str) -> None:
        """`version`: of HTTP, `1.0` or `1.1`."""
        self._state = state
        self.method = method
        self.target = target
        """Path and query, not decoded."""
        self.headers = headers
        """Names in lower case. Values of repeated headers are joined with `, `. Trailers are dropped."""
        self.body = b""
        self.max_body = state.limits.max_body_bytes
        """Bytes. A larger body is not read."""
        self.owner = ""
        """The name of the API key that sends it. Limits that all callers share are divided by it."""
        self.cancellation = Cancellation()
        """Cancelled with a `ClientGoneError` when the client closes its connection."""
        self.started = False
        """The head of the answer was written."""
        self._more_to_read = True
        """Some of the body may not have been received."""
        self._reading_began = False
        """`read` was called. If it raised, the rest of the body is not worth waiting for."""
        self._unchunked = bytearray() if version == "1.0" else None
        """What was written to a stream so far, for a client of HTTP/1.0, which has no chunks: it is sent as a whole at
        the end. `None` for others."""
        self._stream_headers: HeaderList = ()

    @property
    def announced(self) -> int:
        """Bytes of the body by the request's head; 0 if it does not say."""
        return int(self.headers.get(b"content-length", b"0"))

    async def read(self) -> None:
        """Read the body. Raises an `ApiError`: 413 for a body larger than `max_body`, 408 for one that comes too
        slowly, 503 for one for which there is no room; and `ClientGoneError`."""
        self._reading_began = True
        limits, bodies, began = self._state.limits, self._state.bodies, asyncio.get_running_loop().time()
        body, size = bytearray(), self.announced
        bodies.count(self, 0)
        try:
            while self._more_to_read and size <= self.max_body:
                body += await self._receive(began + limits.body_timeout_s + len(body) / _BODY_RATE)
                size = max(size, len(body))
                if self._more_to_read:
                    bodies.count(self, len(body))
                    if self.cancellation.error is not None:
                        raise self.cancellation.error
        except TimeoutError as error:
            allowed = f"{limits.body_timeout_s:g} s plus one second per {_BODY_RATE} bytes"
            raise ApiError(408, "request_timeout", f"The body did not arrive within {allowed}.") from error
        finally:
            bodies.remove(self)
        if size > self.max_body:
            raise ApiError(413, "body_too_large", f"The body is larger than {self.max_body} bytes.")
        self.body = bytes(body)

    async def _receive(self, deadline: float) -> bytes:
        """Wait for the next part of the body, and return it. `deadline`: by the event loop's time. Raises
        `TimeoutError`, `ClientGoneError`, and the error with which the request is cancelled."""
        async with asyncio.timeout_at(deadline):
            with self.cancellation:
                message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._more_to_read = message["more_body"]
        body: bytes = message["body"]
        return body

    async def _discard(self, max_bytes: float) -> None:
        """Receive and drop the rest of the body, but not much more than `max_bytes`, for `LINGER_S` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self._more_to_read and max_bytes > 0:
                    message = await self.receive()
                    self._more_to_read = message.get("more_body", False)
                    max_bytes -= len(message.get("body", b""))

    async def answer(self, status: int, body: bytes, headers: HeaderList = (), content_type: bytes = JSON) -> None:
        """Write a whole answer. If the body of the request is still incomplete, the connection ends with it, as the
        next request could not be told from the body's rest."""
        # The rest of a small body is received first, so that a refused request does not cost its connection.
        if not self._reading_began and b"expect" not in self.headers and self.announced <= _DISCARD_LIMIT:
            await self._discard(_DISCARD_LIMIT)
        kind = ((b"content-type", content_type),) if body else ()
        length = () if status == 204 else ((b"content-length", b"%d" % len(body)),)
        unread = self._more_to_read
        await self._start(status, (*kind, *length, *headers), unread)
        await self.send({"type": "http.response.body", "body": body, "more_body": unread})
        if unread:  # if the connection was closed now, a reset could discard the answer before it is read
            await self._discard(math.inf)
            await self.send({"type": "http.response.body"})

    async def _start(self, status: int, headers: HeaderList, last: bool = False) -> None:
        """Write the head of an answer. `last`: whether the connection ends with this answer."""
        close = (CLOSE,) if last or self._state.closing else ()
        await self.send({"type": "http.response.start", "status": status, "headers": (*headers, *close)})
        self.started = True

    async def start(self, headers: HeaderList = SSE_HEADERS) -> None:
        """Begin a streamed answer, by default of server-sent events."""
        self._stream_headers, self.started = headers, True
        if self._unchunked is None:
            await self._start(200, headers)

    async def write(self, data: bytes) -> None:
        """Write a part of a streamed answer. Waits while the client takes it too slowly."""
        if self._unchunked is not None:
            self._unchunked += data
        elif data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End a streamed answer."""
        if self._unchunked is not None:
            await self._start(200, (*self._stream_headers, (b"content-length", b"%d" % len(self._unchunked))))
        await self.send({"type": "http.response.body", "body": bytes(self._unchunked or b"")})
