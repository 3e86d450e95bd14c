"""nats-py's client, with two faults mended: it leaves sockets of connection attempts open.

Where a server dies between accepting a connection and its first word, nats-py makes the next attempt on the same transport object
and forgets the socket that it had. And where an attempt is cancelled at the moment at which it succeeds, `asyncio.wait_for` of
Python 3.11 loses the connection that it was given. Garbage collection closes such sockets, with a `ResourceWarning`.

This module knows of nats-py's inside: `_transport`, `_connect_to_server` and the fields of its TCP transport.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.transport import TcpTransport


class _Transport(TcpTransport):  # type: ignore[misc]  # nats-py is untyped
    async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(uri.hostname, uri.port, limit=buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer


class TidyClient(Client):  # type: ignore[misc]
    """A client that closes what it opened."""

    _transport: Any

    async def _connect_to_server(self, server: Any) -> None:
        self.abandon()
        if server.uri.scheme in ("ws", "wss"):
            await super()._connect_to_server(server)
            return
        server.last_attempt = time.monotonic()
        self._transport = _Transport()
        await self._transport.connect(server.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    def abandon(self) -> None:
        """Close the socket of an attempt that failed, or of a connection that is over."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
