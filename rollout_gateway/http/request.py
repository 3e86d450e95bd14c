"""One HTTP request and its answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Protocol

from pipeline.running.ports import host_and_port
from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.http.errors import ApiError

Headers = dict[bytes, bytes]
HeaderList = Iterable[tuple[bytes, bytes]]
SSE_HEADERS: HeaderList = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)

_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t\x20-\x7e\x80-\xff]*")
_JSON = b"application/json"
_JSON_200 = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def header_line(name: bytes, value: bytes) -> bytes:
    """Return a header as it is sent. Raises `ValueError` for a name or value that would end its line or the head."""
    line = b"%b: %b" % (name, value)
    if b":" in name or _HEADER.fullmatch(line) is None:
        raise ValueError(
            f"the name or the value of the header {name[:100]!r} can't be sent: it may hold a line break or a colon"
        )
    return line + b"\r\n"


def ignore_flow(_: bool) -> None:
    """Default of `Request.on_flow`."""


class Channel(Protocol):
    """The connection that a request came on, as its answer needs it."""

    transport: asyncio.Transport

    @property
    def closing(self) -> bool:
        """The server stops: the connection ends with this answer."""

    def answered(self, request: Request) -> None:
        """Take note that the whole answer of `request` was written: the connection then waits for the next request, or
        closes. Not called if the client went away first, or the handler ended in the middle of its answer."""


class Request:
    """A request with its whole body. Answer it with `answer`, or with `start`, `write` and `end`."""

    __slots__ = (
        "_channel", "admitted", "body", "cancellation", "chunked", "gone", "headers",
        "keep_alive", "max_body", "method", "on_flow", "owner", "refusal", "started", "target", "too_large",
    )  # fmt: skip

    def __init__(self, channel: Channel, max_body: int) -> None:
        self._channel = channel
        self.method = ""
        self.target = ""
        """Path and query, not decoded."""
        self.headers: Headers = {}
        """Names in lower case. Of repeated headers the last one counts. Trailers are dropped."""
        self.body = b""
        self.max_body = max_body
        """Bytes. A larger body is not read. `admit` may lower it."""
        self.too_large = False
        """The body is larger than `max_body` and was not read."""
        self.refusal: ApiError | None = None
        """Why `admit` refused the request. Its body was not kept."""
        self.admitted: Any = None
        """Result of `admit`, for the handler."""
        self.owner = ""
        """The name of the API key that sends it, set by `admit`. Limits that all callers share are divided by it."""
        self.keep_alive = False
        self.cancellation = Cancellation()
        """Cancelled with a `ClientGoneError` when the client closes its connection."""
        self.gone = False
        """The client closed its connection."""
        self.started = False
        """The head of the answer was written."""
        self.on_flow: Callable[[bool], None] = ignore_flow
        """Called with true when the client takes a stream too slowly, and with false when it has caught up."""
        self.chunked = True
        """Streams go out in chunked coding. False for HTTP/1.0, where a stream ends with its connection."""

    @property
    def server(self) -> str:
        """`host:port` that the client connected to."""
        return host_and_port(*self._channel.transport.get_extra_info("sockname")[:2])

    def answer(self, status: int, body: bytes, headers: HeaderList = (), content_type: bytes = _JSON) -> None:
        """Write a whole answer. Raises `ValueError` for an invalid header, before anything is written."""
        if self._channel.closing:
            self.keep_alive = False
        if status == 200 and self.keep_alive and not headers and content_type == _JSON:
            head = _JSON_200 % len(body)
        else:
            length = () if status == 204 else ((b"content-length", b"%d" % len(body)),)
            kind = ((b"content-type", content_type),) if body else ()
            head = self._head(status, (*kind, *length, *headers))
        self.started = True
        if self._is_lost():
            return
        self._channel.transport.write(head if self.method == "HEAD" else head + body)
        self._channel.answered(self)

    def start(self, status: int, headers: HeaderList) -> None:
        """Write the head of a streamed answer. Raises `ValueError` for an invalid header, as `answer` does."""
        if self.chunked:
            headers = (*headers, (b"transfer-encoding", b"chunked"))
        if self._channel.closing or not self.chunked:
            self.keep_alive = False
        head = self._head(status, headers)
        self.started = True
        if not self._is_lost():
            self._channel.transport.write(head)

    def write(self, data: bytes) -> None:
        """Write a part of a streamed answer."""
        if data and not self._is_lost():
            self._channel.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def write_chunks(self, data: bytes) -> None:
        """Write parts of a streamed answer that are in chunked coding already. Only where `chunked` is true."""
        if not self._is_lost():
            self._channel.transport.write(data)

    def end(self) -> None:
        """End a streamed answer."""
        if not self._is_lost():
            if self.chunked:
                self._channel.transport.write(b"0\r\n\r\n")
            self._channel.answered(self)

    def _is_lost(self) -> bool:
        """Whether nothing can be written any more. The transport knows it a moment before `gone` is set."""
        return self.gone or self._channel.transport.is_closing()

    def _head(self, status: int, headers: HeaderList) -> bytes:
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d Status\r\n" % status]
        lines += [header_line(*header) for header in headers]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
