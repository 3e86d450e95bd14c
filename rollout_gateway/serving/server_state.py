"""What an inference server tells about itself: its health, its process and the adapters that it has loaded."""

from __future__ import annotations

import msgspec

from rollout_gateway.http.upstream import Upstream, UpstreamError


class _ModelCard(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


async def check_health(server: Upstream) -> None:
    """Raise `UpstreamError` if the server is not healthy."""
    await _fetch(server, "/health")


async def loaded_adapters(server: Upstream) -> dict[str, str]:
    """Return the paths of the loaded adapters by version. Raises `UpstreamError`, `msgspec.DecodeError`."""
    cards = msgspec.json.decode(await _fetch(server, "/v1/models"), type=_ModelCards).data
    return {card.id: card.root or "" for card in cards if card.parent is not None}


async def process_start_time(server: Upstream) -> str:
    """Return the start time of the server's process from its metrics, which identifies the process; empty if it has no
    metrics. Raises `UpstreamError`."""
    status, body = await server.fetch("GET", "/metrics")
    for line in body.splitlines() if status == 200 else ():
        if line.startswith(b"process_start_time_seconds"):
            return line.split()[-1].decode()
    return ""


async def _fetch(server: Upstream, path: str) -> bytes:
    status, body = await server.fetch("GET", path)
    if status != 200:
        raise UpstreamError(f"GET {path} was answered {status}", answered=True)
    return body
