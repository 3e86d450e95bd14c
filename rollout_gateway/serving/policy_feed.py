"""Server-sent events about policy versions, for `GET /v1/policies/events`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rollout_gateway.access.api_keys import Access

_MOST_QUEUED = 256
_PING_S = 15.0


class PolicyFeed:
    """Sends events to every subscriber. One that falls 256 events behind is disconnected, and may subscribe again."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[bytes | None], Access] = {}

    def broadcast(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event to the subscribers whose key permits the model in `data`."""
        event = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
        for queue, access in list(self._queues.items()):
            if not access.sees(data.get("model", "")):
                continue
            if queue.qsize() < _MOST_QUEUED:
                queue.put_nowait(event)
            else:
                del self._queues[queue]
                queue.put_nowait(None)

    def close(self) -> None:
        """End all subscriptions."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def subscribe(self, state: msgspec.Struct, access: Access) -> AsyncIterator[bytes]:
        """The present `state`, then each event as it happens. A comment every 15 seconds keeps the connection open."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues[queue] = access
        try:
            yield b"event: state\ndata: %b\n\n" % msgspec.json.encode(state)
            while True:
                try:
                    async with asyncio.timeout(_PING_S):
                        event = await queue.get()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._queues.pop(queue, None)
