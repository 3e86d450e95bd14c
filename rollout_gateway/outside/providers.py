"""A provider: its key, and the connections to it."""

from __future__ import annotations

import os

import aiohttp

from pipeline.config import ConfigError, OutsideConfig
from rollout_gateway.http.request import Headers
from rollout_gateway.http.upstream import UpstreamReply, upstream_errors
from rollout_gateway.outside.requests import PATHS, headers_for, passes

_CONNECT_S = 10.0
_HIDDEN = b"[provider's key]"


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
    def full(self) -> bool:
        """Whether it answers as many calls as its table permits."""
        return 0 < self.table.max_calls <= self._calls

    async def post(self, rest: str, headers: Headers, body: bytes) -> ProviderReply:
        """Post a call to `rest`, below the dialect's path, with the agent's headers, and wait for the reply's head. The
        caller closes the reply.

        It is sent once: what a provider may have got is not repeated. Raises `UpstreamError`."""
        if self._session is None:
            connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, trust_env=True)
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
        return ProviderReply(response, self)

    def hide_key(self, data: bytes) -> bytes:
        """Return what the provider said without its key, which it may have repeated."""
        return data.replace(self._key.encode(), _HIDDEN) if self._key else data

    def end_call(self) -> None:
        self._calls -= 1

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()


class ProviderReply(UpstreamReply):
    """A provider's reply whose head has come."""

    def __init__(self, response: aiohttp.ClientResponse, provider: Provider) -> None:
        super().__init__(response, provider.url)
        self._provider, self._closed, self.table = provider, False, provider.table
        self.hide_key = provider.hide_key
        headers = [(name.lower(), self.hide_key(value)) for name, value in response.raw_headers]
        self.kind = dict(headers).get(b"content-type", b"")
        """The content type."""
        self.passed = [(n, value) for n, value in headers if passes(n) and n != b"content-type"]
        """The other headers that the agent gets."""

    async def read(self) -> bytes:
        return self.hide_key(await super().read())

    def close(self) -> None:
        super().close()
        if not self._closed:
            self._closed = True
            self._provider.end_call()
