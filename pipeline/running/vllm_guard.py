"""Requires the API key on every path of vLLM except `/health`.

vLLM's own check covers `/v1` and a few other prefixes; `/invocations` and `/metrics` answer without a key.
`journeywork up` passes this class to vLLM by `--middleware`, so it runs in vLLM's process and imports nothing.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

OPEN = frozenset({"/health"})
"""Paths that need no key."""
_BODY = b'{"error": "Unauthorized"}'


class RequireKey:
    """ASGI middleware. The key comes from the environment variable VLLM_API_KEY."""

    def __init__(self, app: App) -> None:
        """`app`: vLLM's. Raises `RuntimeError` if there is no key."""
        key = os.environ.get("VLLM_API_KEY", "")
        if not key:
            raise RuntimeError("pipeline.running.vllm_guard needs the environment variable VLLM_API_KEY")
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Pass a request on to vLLM if it has the key or needs none; else answer 401, or close a websocket. Keys are
        compared in constant time."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(authorization, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_BODY))]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": _BODY})
