"""The HTTP client for inference servers and providers: aiohttp's, with one retry.

A server may close a pooled connection just as a request goes out on it. A request whose connection ends before its
reply's head has come is sent once more, on a new connection. "Upstream" is the server that the gateway asks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp

_CONNECT_S = 10.0
_PLAIN = re.compile(r"[!-~]*")


class UpstreamError(Exception):
    """The server could not be reached, or it broke off."""

    sent = True
    """The server may have the request. False if there was no connection, so that it can safely be sent again."""
    lost = False
    """The connection ended before the head of a reply had come: a pooled one may have been closed already."""


class UpstreamTimeoutError(UpstreamError):
    """The reply was not complete in time."""


class UpstreamInvalidError(UpstreamError):
    """The reply is none that a client can get. The message says why."""


@contextmanager
def upstream_errors(url: str) -> Iterator[None]:
    """Raise an `UpstreamError` for what aiohttp raises in the block. `url`: of the server, for the message."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        unreachable = UpstreamError(f"{url} can't be reached: {error}")
        unreachable.sent = False
        raise unreachable from error
    except TimeoutError as error:
        raise UpstreamTimeoutError("the reply was not complete in time") from error
    except (aiohttp.ClientError, OSError) as error:
        broken = UpstreamError(f"the connection broke: {str(error) or type(error).__name__}")
        broken.lost = isinstance(error, aiohttp.ServerDisconnectedError | OSError)
        raise broken from error


class UpstreamReply:
    """A reply whose head has come. Read it to its end, or `close` it."""

    max_bytes = 256 << 20
    """Bytes of a whole answer at most: 128 choices of 1,000 tokens with 20 `top_logprobs` fit."""

    def __init__(self, response: aiohttp.ClientResponse, url: str) -> None:
        self._response, self.status, self._url = response, response.status, url

    async def read(self, begun: bytes = b"") -> bytes:
        """Return the whole body, or `begun` and what follows it. Raises `UpstreamError`, an `UpstreamInvalidError` for
        one that is too long."""
        body = bytearray(begun)
        try:
            while part := await self.read_some():
                body += part
                self.check_size(len(body))
        except BaseException:
            self.close()
            raise
        return bytes(body)

    def check_size(self, size: int) -> None:
        """Raise an `UpstreamInvalidError` if a reply of `size` bytes is longer than `max_bytes`."""
        if size > self.max_bytes:
            raise UpstreamInvalidError(f"it is longer than {self.max_bytes >> 20} MiB")

    async def read_some(self) -> bytes:
        """Wait until a part of the body arrives, and return it; empty bytes at the body's end. Raises
        `UpstreamError`."""
        with upstream_errors(self._url):
            return await self._response.content.readany()

    def close(self) -> None:
        """Release the connection. An incomplete reply is broken off, which tells the server to stop."""
        self._response.close()


def new_session(*, force_close: bool = False, **kwargs: Any) -> aiohttp.ClientSession:
    """Make a session of as many connections as are asked for, which keeps no cookies and gives bodies as they came. It
    is made in the event loop. `force_close`: each request has a connection of its own."""
    connector, jar = aiohttp.TCPConnector(limit=0, force_close=force_close), aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False, **kwargs)


class Upstream:
    """One server and the connections to it."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """`api_key`: sent with every request as a bearer token; empty: none. Raises `ValueError` for what is no http(s)
        URL, or can't be sent."""
        parts = urlsplit(url)
        plain = _PLAIN.fullmatch(url + api_key) and "@" not in parts.netloc and parts.port != 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise ValueError(f"{url!r} is no http(s) URL, or its key can't be sent in a header")
        self.url = url.rstrip("/")
        bearer = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **bearer}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """By whether the session keeps connections for later requests. The one that does not is for the retry."""

    def _session(self, *, pooled: bool) -> aiohttp.ClientSession:
        """The session that keeps connections, or the one that does not. It is made at its first use, in the event
        loop."""
        if pooled not in self._sessions:
            self._sessions[pooled] = new_session(force_close=not pooled, headers=self._headers)
        return self._sessions[pooled]

    async def request(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 300.0) -> UpstreamReply:
        """Send a request and wait for the head of its reply. The whole reply must have come within `timeout_s` seconds.

        If the caller is cancelled, the connection is closed, which tells the server to stop. Raises `UpstreamError`."""
        deadline = time.monotonic() + timeout_s
        try:
            return await self._send(self._session(pooled=True), method, path, body, timeout_s)
        except UpstreamError as error:
            if not error.lost:
                raise
        left_s = max(0.01, deadline - time.monotonic())
        try:
            return await self._send(self._session(pooled=False), method, path, body, left_s)
        except UpstreamError as error:
            error.sent = True  # the first time, perhaps
            raise

    async def _send(
        self, session: aiohttp.ClientSession, method: str, path: str, body: bytes, timeout_s: float
    ) -> UpstreamReply:
        """Send a request once, by a session. Raises `UpstreamError`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        with upstream_errors(self.url):
            response = await session.request(
                method, self.url + path, data=body or None, timeout=timeout, allow_redirects=False
            )
        return UpstreamReply(response, self.url)

    async def fetch(self, method: str, path: str, body: bytes = b"", *, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Send a request. Returns status and body of the reply. Raises `UpstreamError`."""
        reply = await self.request(method, path, body, timeout_s=timeout_s)
        return reply.status, await reply.read()

    async def close(self) -> None:
        """Close all connections."""
        while self._sessions:
            await self._sessions.popitem()[1].close()
