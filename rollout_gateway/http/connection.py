"""Clients' connections: uvicorn's protocol class, with the limits that uvicorn's settings do not have.

`server` makes a `Connection` for each client. httptools parses the bytes and calls the `on_` methods; uvicorn then runs
the handler of each request. Requests that a client sends before it has the answer to an earlier one ("pipelined") wait
for their turn. A proxy in front of the gateway may read a request in another way than the gateway and so let one
request pass as two ("request smuggling"). Therefore only the framing headers (Content-Length, Transfer-Encoding) decide
where a body ends, an `Upgrade` is ignored, trailers are dropped, and what can be read in two ways is refused."""

from __future__ import annotations

import re
from collections import deque
from types import SimpleNamespace

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError, ClientGoneError, internal_error
from rollout_gateway.http.request import CLOSE, JSON, LINGER_S, Headers, Request, State

logger = get_logger("rollout_gateway.http.connection")

_HEAD_LIMIT = 65536
"""Bytes of a request's URL and headers, and of trailers or chunk extensions before the next byte of a body."""
_FREE_CHUNKS, _MIN_CHUNK_BYTES = 10_000, 16
"""A body of more chunks than `_FREE_CHUNKS` needs `_MIN_CHUNK_BYTES` a chunk on average: each chunk costs time on the
event loop, which all connections share."""
_MAX_PIPELINED = 32
"""Requests that may wait for their answers on one connection."""
_LENGTH_DIGITS = 20
_ABSOLUTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([^/?]+)(.*)")
_SENT_ONCE = frozenset(
    b"host authorization x-api-key content-length transfer-encoding origin forwarded x-journeywork-trajectory "
    b"x-journeywork-group".split()
)
"""Headers that decide who sent a request or where it ends. A request with two of one kind is refused."""


class Connection(HttpToolsProtocol):
    """One client's connection. An `ApiError` that an `on_` method raises refuses the request.

    Of uvicorn's attributes, `cycle` is the request whose head came last, `pipeline` the requests that wait for their
    turn, and `flow` pauses the reading from the socket."""

    server_state: State

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config, state, {})
        self._unanswered: deque[tuple[RequestResponseCycle, Request]] = deque()
        """Requests whose head has come. The first one is being answered, or its body is being read."""
        self._state_since = self.loop.time()
        """The loop's time at which the connection became idle, or the last request began to arrive."""
        self._in_head = False
        """A request has begun to arrive, and its head is not complete."""
        self._bytes_beside_bodies = 0
        """Bytes since the last complete head or byte of a body: of an incomplete head, trailers or chunk extensions."""
        self._chunks = self._body_size = 0
        """Of the request that arrives."""
        self._input_ignored = False
        """Further input is thrown away: a request was refused, or the client left."""
        self._unsent_bytes, self._unsent_since = 0, 0.0
        """Bytes that wait for a slow client, and since when it has taken none of them."""

    # -- asyncio.Protocol

    def connection_made(self, transport: object) -> None:
        """Called when a client has connected: refuse it if there are too many connections and none can be closed."""
        super().connection_made(transport)  # type: ignore[arg-type]  # uvloop's are no subclass; counts it, too
        if not self._make_room():
            message = "The gateway has reached gateway.http.max_connections. Try again."
            self.refuse(ApiError(503, "too_many_connections", message, retry_after_s=1))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended: tell the handlers of its requests that their client is gone."""
        super().connection_lost(exc)
        self._input_ignored = True
        for cycle, request in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
            request.cancellation.cancel(ClientGoneError())
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        """Called with each piece of input: have it parsed, and refuse the request if anything is wrong with it."""
        if self._input_ignored:
            return
        self._bytes_beside_bodies += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._read_body_of_upgrade(data[upgrade.args[0] :])
            if self._bytes_beside_bodies > _HEAD_LIMIT:
                if not self._unanswered or not self._unanswered[-1][0].more_body:
                    raise _head_too_large()
                message = f"Trailers or chunk extensions are longer than {_HEAD_LIMIT} bytes."
                raise ApiError(431, "trailers_too_large", message)
        except (httptools.HttpParserError, ApiError) as error:
            # What an `on_` method raised comes wrapped.
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
            if isinstance(cause, httptools.HttpParserError | UnicodeError):
                cause = ApiError(400, "bad_http", "The request is not valid HTTP/1.1.")
            elif not isinstance(cause, ApiError):
                logger.error("a request failed", exc=cause)
                cause = internal_error()
            self.refuse(cause)

    def _read_body_of_upgrade(self, data: bytes) -> None:
        """Read the body of a request with an `Upgrade` header: `data` is the first of it, and httptools parses nothing
        behind such a head. So a new parser gets a head with the framing headers only, then the body, and calls the
        same methods for it. The connection ends with the answer."""
        self.cycle.keep_alive = False
        lines = [b"POST / HTTP/1.1\r\nConnection: close\r\n"]
        for name, value in self.scope["headers"]:
            if name in (b"content-length", b"transfer-encoding"):
                lines.append(b"%b: %b\r\n" % (name, value))
        names = ("on_chunk_header", "on_body", "on_message_complete")
        body_only = SimpleNamespace(**{name: getattr(self, name) for name in names})
        self.parser = httptools.HttpRequestParser(body_only)
        self.parser.feed_data(b"".join([*lines, b"\r\n", data]))

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        """Called with the first byte of a request."""
        super().on_message_begin()
        self._in_head, self._state_since = True, self.loop.time()
        self._chunks = self._body_size = 0

    def on_headers_complete(self) -> None:
        """Called when the head of a request has come: check it, and let uvicorn run the handler, or queue the request
        behind earlier ones."""
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > _HEAD_LIMIT:
            raise _head_too_large()
        if len(self._unanswered) == _MAX_PIPELINED:
            raise ApiError(400, "bad_http", f"{_MAX_PIPELINED} requests of this connection wait for their answers.")
        method, version = self.parser.get_method().decode("latin-1"), self.parser.get_http_version()
        headers = _read_headers(self.headers, method, version)
        target = self.url.decode("latin-1")
        if not target.startswith("/"):  # absolute form, as proxies get it
            absolute = _ABSOLUTE.fullmatch(target)
            if absolute is None:
                raise ApiError(400, "bad_http", "The target of the request must be a path or an absolute URL.")
            target, headers[b"host"] = "/" + absolute[2].removeprefix("/"), absolute[1].encode("latin-1")
            self.url = target.encode("latin-1")  # uvicorn fails on a URL without a path
        request = Request(self.server_state, method, target, headers, version)
        self.scope["state"]["request"] = request
        super().on_headers_complete()
        self._unanswered.append((self.cycle, request))
        self._in_head, self._bytes_beside_bodies = False, 0
        self.flow.resume_reading()  # uvicorn pauses it while requests wait, and would not notice that the client left
        self.headers = []  # of trailers, which uvicorn would add to those of the request

    def on_chunk_header(self) -> None:
        """Called at each chunk of a chunked body."""
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS and self._body_size < self._chunks * _MIN_CHUNK_BYTES:
            size = f"{_FREE_CHUNKS:,} chunks of less than {_MIN_CHUNK_BYTES} bytes"
            message = f"The body is in over {size}: send larger ones."
            raise ApiError(400, "chunks_too_small", message)

    def on_body(self, body: bytes) -> None:
        """Called with each piece of a body."""
        super().on_body(body)
        self._bytes_beside_bodies = 0
        self._body_size += len(body)

    def on_message_complete(self) -> None:
        """Called when a request has come to its end."""
        if not self.parser.should_upgrade():  # else its body is still to come
            super().on_message_complete()
            self._bytes_beside_bodies = 0

    # -- the end of a request

    def on_response_complete(self) -> None:
        """Begin the next request. uvicorn's own method would start a timer for each idle connection too."""
        self._unanswered.popleft()
        self._state_since = self.loop.time()
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self.flow.resume_reading()
        if (self._input_ignored or self.server_state.closing) and not self._unanswered:
            self._end()

    def refuse(self, error: ApiError) -> None:
        """Answer the request that is arriving with an error, and end the connection after the answers to the requests
        before it. If its handler runs already, because its head was complete, the handler gets the error. If earlier
        requests still wait for their answers, the refused one gets none: the client would take it for one of theirs."""
        if self._input_ignored:
            return
        self._input_ignored = True
        if self._unanswered:
            cycle, request = self._unanswered[-1]
            if cycle.more_body:
                request.cancellation.cancel(error)
        else:
            body = error.body()
            headers = ((b"content-type", JSON), (b"content-length", b"%d" % len(body)), CLOSE, *error.headers)
            head = b"".join([b"%b: %b\r\n" % header for header in headers])
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
            self._end()

    def _end(self) -> None:
        """End the connection in order: say that nothing more comes, and leave the client `LINGER_S` to read its last
        answer, which an immediate close could discard."""
        self._input_ignored = True
        if not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.abort)

    # -- limits

    @property
    def _closable(self) -> bool:
        """Whether the connection may be closed to make room for another: it is idle, or its only request is still
        arriving."""
        return not self._unanswered or (len(self._unanswered) == 1 and self._unanswered[0][0].more_body)

    def _make_room(self) -> bool:
        """At the limit of connections, close those that have been idle longest, or else those whose request has been
        arriving longest. Returns false if all others are being answered, so that this one has to be refused. A
        hundredth of the limit is closed at once: the search takes time, and not each new connection shall need one."""
        connections, most = self.server_state.connections, self.server_state.limits.max_connections
        if len(connections) <= most:
            return True
        others = [c for c in connections if isinstance(c, Connection) and c is not self and c._closable]
        by_age = sorted(others, key=lambda c: (c._in_head or bool(c._unanswered), c._state_since))
        for connection in by_age[: max(1, most // 100)]:
            connections.discard(connection)
            connection.transport.abort()
        return bool(others)

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client has been silent or slow for too long. `server` calls it about once a
        second; `now` is the loop's time. The deadline of a body is `Request.read`'s."""
        limits, waited = self.server_state.limits, now - self._state_since
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        elif now - self._unsent_since > limits.write_timeout_s:
            self.transport.abort()
        if self._unanswered or self._input_ignored:
            return
        if self._in_head:
            if waited > limits.head_timeout_s:
                message = f"The headers did not arrive within {limits.head_timeout_s:g} s."
                self.refuse(ApiError(408, "request_timeout", message))
        elif waited > (limits.head_timeout_s if self.cycle is None else limits.idle_timeout_s):
            self.transport.close()


def _head_too_large() -> ApiError:
    """Return the 431 for a request whose URL and headers are too long."""
    return ApiError(431, "headers_too_large", f"The URL and the headers are longer than {_HEAD_LIMIT} bytes.")


def _read_headers(pairs: list[tuple[bytes, bytes]], method: str, version: str) -> Headers:
    """Return the headers of a request. Raises an `ApiError` for a repeated header of `_SENT_ONCE`, a Content-Length of
    too many digits, CONNECT, an HTTP version other than 1.0 and 1.1, a missing Host, and an unsupported
    Transfer-Encoding. httptools itself refuses a Content-Length beside a Transfer-Encoding."""
    headers: Headers = {}
    for name, value in pairs:
        if name in headers and name in _SENT_ONCE:
            message = f"The header {name.decode('latin-1')!r} came twice: send it once."
            raise ApiError(400, "repeated_header", message)
        # RFC 9112 takes white space off both ends; httptools only off the beginning.
        value = value.rstrip(b" \t")
        headers[name] = headers[name] + b", " + value if name in headers else value
    if len(headers.get(b"content-length", b"")) > _LENGTH_DIGITS:
        raise ApiError(400, "bad_http", f"The Content-Length has more than {_LENGTH_DIGITS} digits.")
    if method == "CONNECT":
        raise ApiError(405, "method_not_allowed", "CONNECT is not supported: this server is not a proxy.")
    if version not in ("1.0", "1.1"):
        raise ApiError(505, "bad_http", "The only supported versions are HTTP/1.0 and HTTP/1.1.")
    if version == "1.1" and b"host" not in headers:
        raise ApiError(400, "no_host", "The Host header is missing.")
    if version == "1.0" and b"transfer-encoding" in headers:
        raise ApiError(400, "bad_http", "HTTP/1.0 has no Transfer-Encoding.")
    if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        message = "The only supported Transfer-Encoding is `chunked`."
        raise ApiError(501, "unsupported_transfer_encoding", message)
    return headers
