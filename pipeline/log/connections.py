"""The end of a connection to the log."""

from __future__ import annotations

import anyio
import nats.errors

from pipeline.log import retry
from pipeline.log.fast_client import FastClient
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.log.connections")


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
