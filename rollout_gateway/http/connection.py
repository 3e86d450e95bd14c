"""One client's connection: from its bytes to requests, and what is refused on the way.

What a body is, only the framing headers say. An `Upgrade` is ignored, so nothing inside a body can become a request; a
`CONNECT` is refused; trailers are read, counted and dropped; a header that says whose the request is may come once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http import half_close
from rollout_gateway.http.errors import ApiError, ClientGoneError, error_body
from rollout_gateway.http.request import Request, ignored, nothing

if TYPE_CHECKING:
    from rollout_gateway.http.server import Server

log = get_logger("rollout_gateway.http.server")

_HEAD_LIMIT = 65536
"""Bytes of a request's head, and of trailers or chunk extensions before the next byte of a body."""
_AHEAD_LIMIT = 65536
"""Bytes a client may send ahead of an answer before reading from it pauses."""
_DISCARD_LIMIT = 65536
"""Bytes of a refused request's body that are read, so that its connection can be used again."""
_WRITE_HIGH = 262144
"""Bytes an answer may have waiting for a slow client before its source pauses."""
_LINGER_S = 2.0
"""How long a client that is still sending gets to read why it was refused."""
_BODY_RATE = 65536
"""Bytes of a body for which a client gets a second more."""
_ONCE = frozenset(
    (b"host", b"authorization", b"x-api-key", b"content-length", b"transfer-encoding", b"origin", b"forwarded",
     b"x-journeyman-trajectory", b"x-journeyman-group", b"x-journeyman-attempt")
)  # fmt: skip
"""Headers that decide whose a request is or where it ends: two of them are an error, whatever a proxy made of them."""
_FAULT = "The gateway failed: its log says why."


class Connection(asyncio.Protocol):
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
        """Set once the client has taken what waits for it. `None` when nothing waits."""
        self.paused = False
        self.deaf = False
        """Nothing more is read: what comes is thrown away."""
        self.half_closed = False
        """The client sends nothing more, and may still listen."""
        self.fresh = True
        """No request has come yet."""
        self.closing_at = 0.0
        self.heard_at = self.began_at = self.loop.time()
        """`began_at`: since when it is idle, or the head or the body that is being read has been coming."""
        self.unsent, self.unsent_at = 0, 0.0
        """Bytes that wait for a slow client, and since when it has taken none of them."""
        self.held = 0
        """Bytes of a body that is not whole, as far as they are in `Server.buffered`."""
        self._reset()

    def _reset(self) -> None:
        self._release()
        self.request: Request | None = None
        """The request that is being read."""
        self.size = 0
        self.head_size = 0
        self.silent = 0
        """Bytes since the last byte of a body: trailers and chunk extensions."""
        self.head_done = False
        self.repeated = b""
        self.upgrading = False
        self.resuming = False
        self.url = b""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_WRITE_HIGH)
        if not self.server.admit_connection(self):
            self._refuse(503, "This gateway has as many connections as gateway.max_connections allows.", "too_many_connections")  # fmt: skip
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.forget(self)
        self._release()
        self.deaf = True
        self.waiting.clear()
        self.ahead.clear()
        self.request = None
        self._unchoke()
        active, self.active = self.active, None
        if active is not None:
            active.gone = True
            active.cancellation.cancel(ClientGoneError())
            active.on_gone()
            active.on_gone, active.on_flow = nothing, ignored

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

    def eof_received(self) -> bool:
        """The client ended its side. It may have left, or may wait for its answer: that shows once something is sent."""
        if self.active is None and not self.waiting and not self.ahead:
            return False
        self.half_closed = True
        half_close.watch(self)
        return True

    def _feed(self, data: bytes) -> None:
        if self.head_done:
            self.silent += len(data)
        else:
            self.head_size += len(data)
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if not self.deaf and self._resume(data):
                    continue
            except httptools.HttpParserError:
                self._refuse(400, "This is not HTTP/1.1.", "bad_http")
                return
            break
        if self.request is None or self.deaf:
            return
        if self.head_size > _HEAD_LIMIT and not self.head_done:
            self._refuse(431, f"The headers are longer than {_HEAD_LIMIT} bytes.", "headers_too_large")
        elif self.silent > _HEAD_LIMIT:
            self._refuse(431, f"Trailers or chunk extensions are longer than {_HEAD_LIMIT} bytes.", "trailers_too_large")  # fmt: skip
        elif self.parts:
            self._hold()

    def _hold(self) -> None:
        """Count the body so far with those of all connections. A body that comes in one piece never gets here."""
        server = self.server
        server.buffered += self.size - self.held
        self.held = self.size
        if server.buffered > server.limits.max_buffered:
            server.make_room()

    def _release(self) -> None:
        """The body is whole, or is not kept."""
        self.parts: list[bytes | bytearray] = []
        if self.held:
            self.server.buffered -= self.held
            self.held = 0

    def refuse_body(self) -> None:
        """Give up a body that is not whole, because all such bodies together are too large."""
        self._refuse(
            503,
            "The requests that are being sent to this gateway are larger together than gateway.max_buffered_bytes. Try again.",
            "too_many_bodies",
            ((b"retry-after", b"1"),),
        )

    def _resume(self, data: bytes) -> bool:
        """No other protocol is spoken here, but the parser takes what follows an `Upgrade` for one: have the body read
        as a body by a parser that was told nothing but the framing. Whether there is `data` to go on with."""
        request = self.request
        assert request is not None
        self.upgrading, self.resuming = False, True
        self.parser = httptools.HttpRequestParser(self)
        head = b"POST / HTTP/1.1\r\n"
        for name in (b"content-length", b"transfer-encoding"):
            if name in request.headers:
                head += b"%b: %b\r\n" % (name, request.headers[name])
        self.parser.feed_data(head + b"\r\n")
        return bool(data)

    def _refuse(
        self, status: int, message: str, code: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Answer what never became a request, after those before it."""
        if self.deaf:
            return
        self.deaf = True
        self._release()
        if self.active is not None:
            return  # it is answered, then the connection ends
        request = Request(self, 0)
        self.active = request
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        request.answer(status, error_body(message, kind, code), headers)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self.resuming:
            return
        self.request = Request(self, self.server.limits.max_body)
        self.began_at = self.heard_at
        self.server.reads(self)

    def on_url(self, url: bytes) -> None:
        if not self.resuming:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # a trailer, or the framing told again
        assert self.request is not None
        headers, name = self.request.headers, name.lower()
        if name in headers and name in _ONCE:
            self.repeated = name
        headers[name] = value

    def on_headers_complete(self) -> None:
        if self.resuming:
            self.resuming = False
            return
        request, parser = self.request, self.parser
        assert request is not None
        self.head_done, self.fresh = True, False
        self.began_at = self.heard_at
        if self.deaf:
            return
        headers = request.headers
        request.method = parser.get_method().decode("latin-1")
        version = parser.get_http_version()
        if not self._well_formed(request, version):
            return
        request.target = self.url.decode("latin-1")
        if not request.target.startswith("/"):  # the form that is meant for proxies
            authority, _, rest = request.target.partition("://")[2].partition("/")
            request.target = "/" + rest
            headers[b"host"] = authority.encode("latin-1")
        request.keep_alive = parser.should_keep_alive()
        request.plain = version == "1.0"
        self.upgrading = b"upgrade" in headers and parser.should_upgrade()
        try:
            self.server.admit(request)
        except ApiError as error:
            request.refusal = error
        except Exception as error:  # noqa: BLE001 - the edge of supervision, as in `_handle`
            log.error("a request failed", target=request.target[:200], exc=error)
            request.refusal = ApiError(500, _FAULT, kind="api_error", code="internal_error")
        if request.refusal is not None:
            request.max_body = min(request.max_body, _DISCARD_LIMIT)
        length = headers.get(b"content-length", b"0")
        if int(length) > request.max_body:
            self._too_large(request)
        elif (
            b"expect" in headers
            and headers[b"expect"].lower() == b"100-continue"
            and version != "1.0"
            and self.active is None
            and request.refusal is None
        ):
            self.transport.write(half_close.CONTINUE)

    def _well_formed(self, request: Request, version: str) -> bool:
        """Refuse what two programs could read in two ways."""
        headers = request.headers
        if request.method == "CONNECT":
            self._refuse(405, "This is no proxy: it takes no CONNECT.", "method_not_allowed")
        elif self.repeated:
            self._refuse(
                400, f"The header {self.repeated.decode('latin-1')!r} came twice.", "repeated_header"
            )
        elif version == "1.1" and b"host" not in headers:
            self._refuse(400, "A request needs a Host header.", "no_host")
        elif version == "1.0" and b"transfer-encoding" in headers:
            self._refuse(400, "HTTP/1.0 knows no Transfer-Encoding.", "bad_http")
        elif headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            # Two programs could disagree about where such a body ends.
            self._refuse(501, "The only Transfer-Encoding that this server takes is `chunked`.", "unsupported_transfer_encoding")  # fmt: skip
        elif version not in ("1.0", "1.1"):
            self._refuse(505, "This server speaks HTTP/1.1.", "bad_http")
        return not self.deaf

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request is None or self.deaf:
            return
        self.silent = 0
        self.size += len(body)
        if self.size > request.max_body:
            self._too_large(request)
        elif request.refusal is None:
            parts = self.parts
            if len(parts) < 64:
                parts.append(body)
            elif (
                len(parts) == 64
            ):  # many small chunks: as objects of their own they would take far more than their bytes
                parts.append(bytearray(body))
            else:
                cast(bytearray, parts[-1]).extend(body)

    def on_message_complete(self) -> None:
        request = self.request
        if request is None or self.deaf or self.upgrading or self.resuming:
            return
        parts = self.parts
        if parts:
            request.body = cast(bytes, parts[0]) if len(parts) == 1 else b"".join(parts)
        self._reset()
        self._take(request)

    def _too_large(self, request: Request) -> None:
        request.too_large, request.keep_alive = True, False
        self.deaf = True
        self._release()
        self._take(request)

    # -- answering

    def _take(self, request: Request) -> None:
        if self.active is None:
            self._begin(request)
        else:
            self.waiting.append(request)

    def _begin(self, request: Request) -> None:
        self.active = request
        self.server.answers(self)
        if self.server.closing:
            request.keep_alive = False
        self.server.tasks.add(self.loop.create_task(self._handle(request)))

    async def _handle(self, request: Request) -> None:
        try:
            await self.server.handler(request)
        except Exception as error:  # noqa: BLE001 - the edge of supervision: one request's fault is not the service's
            log.error("a request failed", target=request.target[:200], exc=error)
            if not request.started:
                request.answer(500, error_body(_FAULT, "api_error", "internal_error"))
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
        self.began_at = self.loop.time()
        request.on_gone, request.on_flow = nothing, ignored
        if request.keep_alive and not self.server.closing and not (self.deaf and not self.waiting):
            self.server.idles(self)
            return
        self.waiting.clear()
        if self.deaf and not self.transport.is_closing() and not self.half_closed:
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
            self.heard_at = self.loop.time()
            self._feed(data)
        if self.half_closed:
            if self.active is None:  # what is not whole by now never will be
                self.transport.close()
        elif self.paused and len(self.ahead) <= _AHEAD_LIMIT and not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Close what has been silent or slow for too long."""
        limits = self.server.limits
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self.unsent:
            self.unsent, self.unsent_at = unsent, now
        elif now - self.unsent_at > limits.write_s:
            self.transport.abort()
            return
        if self.closing_at:
            if now > self.closing_at:
                self.transport.abort()
        elif self.active is None:
            took = now - self.began_at
            if self.request is None:
                if took > (limits.head_s if self.fresh else limits.idle_s):
                    self.transport.close()
            elif not self.head_done:
                if took > limits.head_s:
                    self._refuse(
                        408, f"The headers did not come within {limits.head_s:g} s.", "request_timeout"
                    )
            elif took > limits.body_s + self.size / _BODY_RATE:
                self._refuse(408, f"The body did not come within {limits.body_s:g} s and a second more for every {_BODY_RATE} bytes.", "request_timeout")  # fmt: skip
