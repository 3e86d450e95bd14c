"""One HTTP request and the way to answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.http.errors import ApiError

if TYPE_CHECKING:
    from rollout_gateway.http.connection import Connection

Headers = dict[bytes, bytes]
HeaderList = Iterable[tuple[bytes, bytes]]

_STATUS = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}
_JSON_200 = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def nothing() -> None:
    """Default of `Request.on_gone`."""


def ignored(_: bool) -> None:
    """Default of `Request.on_flow`."""


class Request:
    """A request and the way to answer it: `answer`, or `start`, `write` and `end`."""

    __slots__ = (
        "_connection", "admitted", "body", "cancellation", "extra", "gone", "headers", "keep_alive", "max_body", "method", "on_flow",
        "on_gone", "plain", "refusal", "started", "target", "too_large",
    )  # fmt: skip

    def __init__(self, connection: Connection, max_body: int) -> None:
        self._connection = connection
        self.method = ""
        self.target = ""
        """Path and query as they came."""
        self.headers: Headers = {}
        """Names in lower case; of a repeated one the last. Trailers are not among them."""
        self.body = b""
        self.max_body = max_body
        """Bytes; a larger body is not read. `admit` may lower it."""
        self.too_large = False
        """The body is larger than `max_body` and was not read."""
        self.refusal: ApiError | None = None
        """Why `admit` refused the request. Its body was not kept."""
        self.admitted: Any = None
        """What `admit` found out about the request, for the handler."""
        self.extra: tuple[tuple[bytes, bytes], ...] = ()
        """Headers that any answer to this request carries."""
        self.keep_alive = False
        self.cancellation = Cancellation()
        """Cancelled with a `ClientGoneError` when the client closes its connection."""
        self.gone = False
        """The client closed its connection."""
        self.started = False
        """An answer has begun."""
        self.on_gone: Callable[[], None] = nothing
        self.on_flow: Callable[[bool], None] = ignored
        """Called with true where the client takes a stream too slowly, with false when it may go on."""
        self.plain = False
        """HTTP/1.0 knows no chunks: such a stream ends with its connection."""

    @property
    def server(self) -> str:
        """`host:port` that the client reached."""
        host, port = self._connection.transport.get_extra_info("sockname")[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def peer(self) -> str:
        """The IP address at the other end of the connection: the client's, or its proxy's."""
        peer = self._connection.transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def answer(
        self, status: int, body: bytes, headers: HeaderList = (), content_type: bytes = b"application/json"
    ) -> None:
        """The whole answer."""
        self._begin()
        if self._lost():
            return
        if (
            status == 200
            and self.keep_alive
            and not headers
            and not self.extra
            and content_type == b"application/json"
        ):
            head = _JSON_200 % len(body)
        else:
            length = () if status == 204 else ((b"content-length", b"%d" % len(body)),)
            kind = ((b"content-type", content_type),) if body else ()
            head = self._head(status, (*kind, *length, *headers))
        connection = self._connection
        connection.transport.write(head if self.method == "HEAD" else head + body)
        connection.answered(self)

    def start(self, status: int, headers: HeaderList) -> None:
        """The head of a streamed answer."""
        self._begin()
        if self._lost():
            return
        if self.plain:
            self.keep_alive = False
        else:
            headers = (*headers, (b"transfer-encoding", b"chunked"))
        self._connection.transport.write(self._head(status, headers))

    def write(self, data: bytes) -> None:
        """A piece of a streamed answer."""
        if data and not self._lost():
            self._connection.transport.write(data if self.plain else b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def chunked(self) -> bool:
        """Whether a stream's pieces go out in HTTP's chunked coding."""
        return not self.plain

    def write_chunks(self, data: bytes) -> None:
        """Pieces of a streamed answer that are in chunked coding already."""
        if not self._lost():
            self._connection.transport.write(data)

    def end(self) -> None:
        """The end of a streamed answer."""
        if not self._lost():
            if not self.plain:
                self._connection.transport.write(b"0\r\n\r\n")
            self._connection.answered(self)

    def _begin(self) -> None:
        self.started = True
        if (
            self._connection.server.closing
        ):  # what the head says must hold: the connection ends with this answer
            self.keep_alive = False

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
        lines += [b"%b: %b\r\n" % header for header in self.extra]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)
