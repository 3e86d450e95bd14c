"""The connections of this process to the log."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from pipeline.log.fast_client import FastClient

_open: weakref.WeakSet[FastClient] = weakref.WeakSet()


def add(client: FastClient) -> None:
    """Have `use_servers` reach a connection."""
    _open.add(client)


async def use_servers(servers: Sequence[str]) -> None:
    """Have every connection use these addresses: it reconnects at once if its server is not among them."""
    for client in list(_open):
        if not client.is_closed:
            await client.use_servers(servers)
