"""A provider: its key, and the connections to it.

`rollout_gateway.outside.relay` posts an agent's call with `Provider.post` and reads the `ProviderReply`. The provider's
key replaces the agent's and is hidden in everything that comes back."""

from __future__ import annotations

import os
import re

import aiohttp

from pipeline.config import ConfigError, OutsideConfig
from rollout_gateway.http.request import Headers
from rollout_gateway.http.upstream import UpstreamInvalidError, UpstreamReply, new_session, upstream_errors
from rollout_gateway.outside.requests import PATHS, headers_for, is_passed_to_agent

_CONNECT_S = 10.0
_HIDDEN = b"[provider's key]"
_CONTROL = re.compile(rb"[\x00-\x08\n-\x1f\x7f]")
"""What no header may hold: a client could take it for the end of the header."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')
"""A JSON text."""
_ESCAPED = re.compile(rb"\\u00([0-7][0-9a-fA-F])")
"""An ASCII character as JSON may escape it."""


class Provider:
    """One table of `[[outside]]`, with the connections to its provider."""

    def __init__(self, table: OutsideConfig) -> None:
        """Raises `ConfigError` if the environment lacks the key, or no header can hold it."""
        name = table.api_key_env
        self.table, self._key = table, os.environ.get(name, "") if name else ""
        if name and not (self._key and self._key.isascii() and self._key.isprintable()):
            raise ConfigError(f"outside.api_key_env: the environment has no key in {name}: set it for the gateway")
        self.url = table.url.rstrip("/")
        self._calls = 0
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_full(self) -> bool:
        """Whether it answers as many calls as its table permits."""
        return 0 < self.table.max_calls <= self._calls

    async def post(self, rest: str, headers: Headers, body: bytes) -> ProviderReply:
        """Post a call to `rest`, below the dialect's path, with the agent's headers, and wait for the reply's head. The
        caller closes the reply.

        It is sent once: what a provider may have got is not repeated. Raises `UpstreamError`, an `UpstreamInvalidError`
        for a reply that no client can get, or that is compressed although that was not asked."""
        if self._session is None:
            self._session = new_session(trust_env=True)
        timeout = aiohttp.ClientTimeout(total=self.table.timeout_s, sock_connect=_CONNECT_S)
        path = PATHS[self.table.dialect].removeprefix("/v1") + rest
        self._calls += 1
        try:
            with upstream_errors(self.url):
                response = await self._session.post(
                    self.url + path,
                    data=body,
                    headers=headers_for(headers, self.table.dialect, self._key),
                    timeout=timeout,
                    allow_redirects=False,
                    skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
                )
        except BaseException:
            self._calls -= 1
            raise
        reply = ProviderReply(response, self)
        if invalid := reply.invalid():
            reply.close()
            raise UpstreamInvalidError(invalid)
        return reply

    def hide_key(self, data: bytes) -> bytes:
        """Return what the provider sent with its key replaced by `_HIDDEN`: a provider may repeat the key. A JSON text
        that holds the key with escapes is replaced as a whole."""
        if not self._key:
            return data
        data, key = data.replace(self._key.encode(), _HIDDEN), _unescaped(self._key.encode())
        if b"\\" not in data or key not in _unescaped(data):
            return data
        return _TEXT.sub(lambda text: b'"%b"' % _HIDDEN if key in _unescaped(text[0]) else text[0], data)

    def end_call(self) -> None:
        """Count a call that is over. Its reply does this when it is closed."""
        self._calls -= 1

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()


class ProviderReply(UpstreamReply):
    """A provider's reply whose head has come."""

    max_bytes = 64 << 20

    def __init__(self, response: aiohttp.ClientResponse, provider: Provider) -> None:
        super().__init__(response, provider.url)
        self._provider, self._closed = provider, False
        self.table = provider.table
        """The provider's settings."""
        self.hide_key = provider.hide_key
        headers = [(name.lower(), self.hide_key(value)) for name, value in response.raw_headers]
        self.content_type = dict(headers).get(b"content-type", b"")
        self.headers_for_agent = [(n, value) for n, value in headers if is_passed_to_agent(n) and n != b"content-type"]
        """The headers that the agent gets besides `content-type`."""

    def invalid(self) -> str:
        """Return what is wrong with the head of the reply, or an empty string."""
        if not 200 <= self.status <= 599:
            return f"its status is {self.status}"
        for name, value in [(b"content-type", self.content_type), *self.headers_for_agent]:
            if _CONTROL.search(value):
                return f"its header {name.decode('latin-1')!r} has a control character"
        coding = self._response.headers.get("content-encoding", "identity").strip().lower()
        return "" if coding == "identity" else f"it is compressed ({coding[:100]!r}) although identity was asked"

    async def read(self, begun: bytes = b"") -> bytes:
        """Return the rest of the body, as the base class does, without the key. Raises `UpstreamInvalidError` for more
        than 64 MiB."""
        return self.hide_key(await super().read(begun))

    def close(self) -> None:
        """End the reply, whether or not it was read to its end. May be called twice."""
        super().close()
        if not self._closed:
            self._closed = True
            self._provider.end_call()


def _unescaped(data: bytes) -> bytes:
    """Return JSON without backslashes, and with the ASCII characters for their escapes."""
    return _ESCAPED.sub(lambda escape: bytes.fromhex(escape[1].decode()), data).replace(b"\\", b"")
