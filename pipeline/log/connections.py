"""The connections of this process to the log."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import anyio
import nats.errors

from pipeline.log import retry
from pipeline.log.fast_client import FastClient
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.connections")

_open: weakref.WeakSet[FastClient] = weakref.WeakSet()
_moved: dict[tuple[str, ...], tuple[str, ...]] = {}
"""The addresses that `use_servers` gave in place of those in the settings."""


def add(client: FastClient) -> None:
    """Have `use_servers` reach a connection."""
    _open.add(client)


def present_servers(given: Sequence[str]) -> list[str]:
    """Return the addresses for a new connection, by those in the settings that this process started with."""
    return list(_moved.get(tuple(given), given))


async def use_servers(servers: Sequence[str], given: Sequence[str]) -> None:
    """Have every connection use these addresses, also those that are made later: an open one reconnects at once if its
    server is not among them. `given`: the addresses in the settings that this process started with."""
    _moved[tuple(given)] = tuple(servers)
    for client in list(_open):
        if not client.is_closed:
            await client.use_servers(servers)


def forget(given: Sequence[str]) -> None:
    """Make new connections by the settings again."""
    _moved.pop(tuple(given), None)


async def close(client: FastClient) -> None:
    """Close a connection in any state."""
    with anyio.move_on_after(2, shield=True):
        try:
            if client.is_connected:
                await client.flush(timeout=1)
            await client.close()
        except (nats.errors.Error, OSError) as error:
            log.warning("the connection was not closed cleanly", error=retry.reason(error))
    client.stop_publishing()
    client.close_socket()
