"""Server-sent events of policy versions: published, loaded, promoted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rollout_gateway.access.api_keys import Access

_BEHIND = 256
_PING_S = 15.0


class Watchers:
    """Whoever watches. One that falls `_BEHIND` events behind is cut off, and starts anew from the present state."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.Queue[bytes | None], Access] = {}

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        event = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
        for queue, access in list(self._queues.items()):
            if not access.sees(data.get("model", "")):
                continue
            if queue.qsize() < _BEHIND:
                queue.put_nowait(event)
            else:
                del self._queues[queue]
                queue.put_nowait(None)

    def close(self) -> None:
        for queue in self._queues:
            queue.put_nowait(None)

    async def watch(self, state: dict[str, Any], access: Access) -> AsyncIterator[bytes]:
        """The present `state`, then every event about a model of the key; a comment now and then keeps the connection open."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues[queue] = access
        try:
            yield b"event: state\ndata: %b\n\n" % msgspec.json.encode(state)
            while True:
                try:
                    async with asyncio.timeout(_PING_S):
                        event = await queue.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if event is None:
                    return
                yield event
        finally:
            self._queues.pop(queue, None)
