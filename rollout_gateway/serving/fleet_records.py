"""Records of sampler agents and gateways: JSON values in the NATS key-value bucket `FLEET`.

One process writes and renews each record. A record expires `sampler.ttl_s` after its last renewal.
"""

from __future__ import annotations

import msgspec


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server that takes calls, written by its sampler agent under `sampler.<project>.<replica>`.

    The versions that the server has loaded are in `policy.loaded` and `policy.unloaded` events instead."""

    url: str
    """URL under which gateways reach the server."""
    models: tuple[str, ...]
    """Names of the models that it serves."""
    server_start: str
    """Start time of the server's process, which identifies the process."""
    refused: dict[str, str] = {}
    """Versions that failed a check on this server, with the reason."""


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that a gateway uses, written by the gateway under `gateway.<project>.<gateway>`."""

    policy_seq: int
    """Sequence of the last event of the stream POLICY that the gateway has applied. The record describes this moment of
    the past: of what happened later it says nothing."""
    serving: tuple[str, ...] = ()
    """Versions that model names resolve to."""
    wanted: tuple[str, ...] = ()
    """Versions that calls wait for because no server holds them."""
    in_flight: dict[str, tuple[str, ...]] = {}
    """For each replica, the versions that calls are using now."""
