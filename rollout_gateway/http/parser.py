"""From a connection's bytes to requests (docs/decisions/gateway.md).

Only the framing headers decide where a body ends. An `Upgrade` is ignored, so nothing inside a body can become a
request. `CONNECT` is refused. Trailers are read, counted and dropped. A request that two programs could read in two
ways is refused."""

from __future__ import annotations

from typing import Protocol, cast

import httptools

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError, internal_error
from rollout_gateway.http.request import Request

log = get_logger("rollout_gateway.http.server")

_HEAD_LIMIT = 65536
"""Bytes of a request's URL and headers, and of trailers or chunk extensions before the next byte of a body."""
_SMALL_PARTS = 64
"""Parts of a body that are kept as separate objects. Further ones are joined: small objects take far more than their
bytes."""
_CHUNKS, _LEAST_CHUNK = 10_000, 16
"""With more chunks than that, a body needs so many bytes a chunk: each costs time on the loop of all connections."""
_UNIQUE = frozenset(
    (b"host", b"authorization", b"x-api-key", b"content-length", b"transfer-encoding", b"origin", b"forwarded",
     b"x-journeywork-trajectory", b"x-journeywork-group", b"x-journeywork-attempt")
)  # fmt: skip
"""Headers that decide who sent a request or where it ends. A request with two of one kind is refused."""


class Receiver(Protocol):
    """The connection, as the parser needs it."""

    ignoring: bool
    """No further input is parsed."""

    def new_request(self) -> Request:
        """A request begins. Returns the object to fill."""

    def head_complete(self, request: Request) -> None:
        """Admit the request. May lower `max_body`, set `refusal`, or refuse it for its length."""

    def request_complete(self, request: Request) -> None:
        """Take the request, whose body is complete or `too_large`."""

    def reject(self, error: ApiError) -> None:
        """Answer with an error and ignore further input."""


class RequestParser:
    """Parses the requests of one connection, one after another. The methods that begin with `on_` are called by
    httptools."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpRequestParser(self)
        self.reset()

    def reset(self) -> None:
        """Forget the request that is being read."""
        self.request: Request | None = None
        """The request that is being read."""
        self.size = 0
        """Bytes of its body so far."""
        self.parts: list[bytes | bytearray] = []
        """Its body so far."""
        self.head_done = False
        self._chunks = 0
        self._head_size = 0
        """Bytes of the URL and headers, as far as they are complete."""
        self._received = 0
        """Bytes since the last request, while the head is not complete."""
        self._silent = 0
        """Bytes since the last byte of a body: trailers and chunk extensions."""
        self._repeated = b""
        self._upgrading = False
        self._resuming = False
        self._url = b""

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Calls the receiver for each part of a request that is complete, and for a parse
        error."""
        if self.head_done:
            self._silent += len(data)
        else:
            self._received += len(data)
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if not self._receiver.ignoring and self._resume(data):
                    continue
            except httptools.HttpParserError as error:
                if isinstance(error, httptools.HttpParserCallbackError):  # not the client's fault
                    log.error("a request failed", exc=error.__context__ or error)
                    self._receiver.reject(internal_error())
                elif str(error) == "Invalid HTTP version":
                    self._reject_version()
                else:
                    self._reject(400, "bad_http", "The request is not valid HTTP/1.1.")
                return
            break
        if self.request is None or self._receiver.ignoring:
            return
        if self._received > _HEAD_LIMIT and not self.head_done:
            self._reject_head()
        elif self._silent > _HEAD_LIMIT:
            message = f"Trailers or chunk extensions are longer than {_HEAD_LIMIT} bytes."
            self._reject(431, "trailers_too_large", message)
        elif self._chunks > _CHUNKS and self.size < self._chunks * _LEAST_CHUNK:
            message = (
                f"The body is in over {_CHUNKS:,} chunks of less than {_LEAST_CHUNK} bytes: send larger ones."
            )
            self._reject(400, "chunks_too_small", message)

    def _resume(self, data: bytes) -> bool:
        """Go on after an `Upgrade` header, behind which httptools parses nothing. A fresh parser is given only the
        framing headers, so it reads the body as a body. Returns whether there is `data` to feed it."""
        request = self.request
        assert request is not None
        self._upgrading, self._resuming = False, True
        self._parser = httptools.HttpRequestParser(self)
        head = b"POST / HTTP/1.1\r\n"
        for name in (b"content-length", b"transfer-encoding"):
            if name in request.headers:
                head += b"%b: %b\r\n" % (name, request.headers[name])
        self._parser.feed_data(head + b"\r\n")
        return bool(data)

    def _reject_head(self) -> None:
        message = f"The URL and the headers are longer than {_HEAD_LIMIT} bytes."
        self._reject(431, "headers_too_large", message)

    def _reject_version(self) -> None:
        self._reject(505, "bad_http", "The only supported versions are HTTP/1.0 and HTTP/1.1.")

    def _reject(self, status: int, code: str, message: str) -> None:
        self._receiver.reject(ApiError(status, code, message))

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if not self._resuming:
            self.request = self._receiver.new_request()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._url += url
            self._head_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # a trailer, or the framing headers that `_resume` repeats
        assert self.request is not None
        headers, name = self.request.headers, name.lower()
        if name in headers and name in _UNIQUE:
            self._repeated = name
        # RFC 9112 takes white space off both ends; httptools only off the beginning.
        headers[name] = value.rstrip(b" \t")
        self._head_size += len(name) + len(value) + 4  # colon, space and line end

    def on_headers_complete(self) -> None:
        if self._resuming:
            self._resuming = False
            return
        request, parser = self.request, self._parser
        assert request is not None
        self.head_done = True
        if self._receiver.ignoring:
            return
        headers = request.headers
        request.method = parser.get_method().decode("latin-1")
        version = parser.get_http_version()
        if self._head_size > _HEAD_LIMIT:
            self._reject_head()
            return
        if not self._is_well_formed(request, version):
            return
        request.target = self._url.decode("latin-1")
        if not request.target.startswith("/"):  # absolute form, as proxies get it
            authority, _, rest = request.target.partition("://")[2].partition("/")
            request.target = "/" + rest
            headers[b"host"] = authority.encode("latin-1")
        request.keep_alive = parser.should_keep_alive()
        request.chunked = version != "1.0"
        self._upgrading = b"upgrade" in headers and parser.should_upgrade()
        self._receiver.head_complete(request)

    def _is_well_formed(self, request: Request, version: str) -> bool:
        """Refuse what two programs could read in two ways."""
        headers = request.headers
        if request.method == "CONNECT":
            self._reject(405, "method_not_allowed", "CONNECT is not supported: this server is not a proxy.")
        elif self._repeated:
            name = self._repeated.decode("latin-1")
            self._reject(400, "repeated_header", f"The header {name!r} came twice: send it once.")
        elif version == "1.1" and b"host" not in headers:
            self._reject(400, "no_host", "The Host header is missing.")
        elif version == "1.0" and b"transfer-encoding" in headers:
            self._reject(400, "bad_http", "HTTP/1.0 has no Transfer-Encoding.")
        elif headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._reject(
                501, "unsupported_transfer_encoding", "The only supported Transfer-Encoding is `chunked`."
            )
        elif version not in ("1.0", "1.1"):
            self._reject_version()
        else:
            return True
        return False

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request is None or self._receiver.ignoring:
            return
        self._silent = 0
        self.size += len(body)
        if self.size > request.max_body:
            self.reject_size()
        elif request.refusal is None:
            parts = self.parts
            if len(parts) < _SMALL_PARTS:
                parts.append(body)
            elif len(parts) == _SMALL_PARTS:
                parts.append(bytearray(body))
            else:
                cast(bytearray, parts[-1]).extend(body)

    def reject_size(self) -> None:
        """Hand over the request without its body, which is too large."""
        request = self.request
        assert request is not None
        request.too_large, request.keep_alive = True, False
        self._receiver.ignoring = True
        self.parts = []
        self._receiver.request_complete(request)

    def on_message_complete(self) -> None:
        request = self.request
        if request is None or self._receiver.ignoring or self._upgrading or self._resuming:
            return
        parts = self.parts
        if parts:
            request.body = cast(bytes, parts[0]) if len(parts) == 1 else b"".join(parts)
        self.reset()
        self._receiver.request_complete(request)
