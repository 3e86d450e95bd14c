"""Server-sent events about policy versions, for `GET /v1/policies/events`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rollout_gateway.access.api_keys import Access
from rollout_gateway.http.errors import ApiError

_MAX_QUEUED = 256
"""Events that may wait for one subscriber."""
MAX_SUBSCRIPTIONS = 100
"""Subscriptions of one API key. Each holds one of the gateway's connections for as long as its client likes."""
_PING_S = 15.0
"""Time without an event after which a comment is sent to keep the connection open."""


class PolicyFeed:
    """Sends events to all subscribers. A subscriber that falls 256 events behind is disconnected; it may subscribe
    again."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[bytes | None], Access] = {}

    def broadcast(self, kind: str, data: dict[str, Any]) -> None:
        """Send an event named `kind` to the subscribers whose API key permits the model in `data`."""
        event = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
        for queue, access in list(self._queues.items()):
            if not access.sees(data.get("model", "")):
                continue
            if queue.qsize() < _MAX_QUEUED:
                queue.put_nowait(event)
            else:
                del self._queues[queue]
                queue.put_nowait(None)

    def close(self) -> None:
        """End all subscriptions."""
        for queue in self._queues:
            queue.put_nowait(None)

    def check(self, access: Access) -> None:
        """Raise a 429 `ApiError` if the caller's key has as many subscriptions as one key may have."""
        if sum(other.owner == access.owner for other in self._queues.values()) >= MAX_SUBSCRIPTIONS:
            message = f"This API key has {MAX_SUBSCRIPTIONS} streams of events open. Close one."
            raise ApiError(429, "too_many_streams", message)

    async def subscribe(self, state: dict[str, Any], access: Access) -> AsyncIterator[bytes]:
        """Yield `state`, the present one, as the first event, then each event when it is broadcast. `access`: the
        rights of the subscriber's key. Ends when the feed is closed or the subscriber is too slow."""
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
