"""Reads an inference server's health, process start time and loaded adapters over HTTP.

`membership` asks before a server gets calls, and the sampler agent beside the server before it loads adapters."""

from __future__ import annotations

import msgspec

from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.upstream import Upstream, UpstreamError

logger = get_logger("rollout_gateway.serving.server_state")


class _ModelCard(msgspec.Struct):
    """An item of vLLM's `/v1/models`: a name of the base model, or an adapter with its `parent` and its folder
    `root`."""

    id: str
    root: str | None = None
    parent: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


async def check_health(server: Upstream) -> None:
    """Raise `UpstreamError` if the server is not healthy."""
    await _fetch(server, "/health")


async def loaded_adapters(server: Upstream) -> dict[str, str]:
    """Return the folders of the loaded adapters by version. Raises `UpstreamError`, `msgspec.DecodeError`."""
    return {card.id: card.root or "" for card in await _model_cards(server) if card.parent is not None}


async def check_base_names(server: Upstream, replica: str, names: list[str]) -> None:
    """Log an error if the server does not serve its base model under each of `names`, which calls for the base model
    have. Raises `UpstreamError`, `msgspec.DecodeError`."""
    served = sorted(card.id for card in await _model_cards(server) if card.parent is None)
    if missing := [name for name in names if name not in served]:
        message = (
            "the inference server does not serve its base model under the name that calls have, so they fail; "
            "start it with --served-model-name and the missing names"
        )
        logger.error(message, replica=replica, missing=missing, served=served)


async def process_start_time(server: Upstream) -> str:
    """Return the start time of the server's process, which identifies the process. It is read from the server's
    metrics; empty if they do not have it. Raises `UpstreamError`."""
    status, body = await server.fetch("GET", "/metrics")
    for line in body.splitlines() if status == 200 else ():
        if line.startswith(b"process_start_time_seconds"):
            return line.split()[-1].decode()
    return ""


async def _model_cards(server: Upstream) -> list[_ModelCard]:
    return msgspec.json.decode(await _fetch(server, "/v1/models"), type=_ModelCards).data


async def _fetch(server: Upstream, path: str) -> bytes:
    """Return the body of a reply. Raises `UpstreamError`, also for another status than 200."""
    status, body = await server.fetch("GET", path)
    if status != 200:
        raise UpstreamError(f"GET {path} was answered with status {status}")
    return body
