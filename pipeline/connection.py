"""nats-py's client, with one fault mended: it leaves the socket of a connection attempt that failed half-way open.

Where a server dies between accepting a connection and its first word, nats-py makes the next attempt on the same transport object
and forgets the socket that it had. Garbage collection closes it then, with a `ResourceWarning`.

This module knows of nats-py's inside: `_transport` and `_connect_to_server`.
"""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client


class TidyClient(Client):  # type: ignore[misc]  # nats-py's client is untyped
    """A client that closes what it opened."""

    _transport: Any

    async def _connect_to_server(self, server: Any) -> None:
        self.abandon()
        await super()._connect_to_server(server)

    def abandon(self) -> None:
        """Close the socket of an attempt that failed, or of a connection that is over."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
