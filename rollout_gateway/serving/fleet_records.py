"""The records of sampler agents and gateways in the key-value bucket `FLEET`, as JSON.

Each is written by one process and renewed by it. It expires `sampler.ttl_s` after the last renewal.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An inference server that takes calls, written by its sampler agent under `sampler.<project>.<replica>`.

    The versions that the server holds are not in the record: `policy.loaded` and `policy.unloaded` events say them."""

    url: str
    """URL under which gateways reach the server."""
    models: tuple[str, ...]
    """Names of the models that it serves."""
    incarnation: str
    """Identifies the server's process; changes when the server restarts."""
    capacity: float = 1.0
    """Share of the conversations that it gets, relative to other servers."""
    refused: dict[str, str] = {}
    """Versions that failed a check on this server, with the reason."""


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that a gateway uses, written by the gateway under `gateway.<project>.<gateway>`."""

    policy_seq: int
    """Sequence of the last event of the stream POLICY that the gateway has applied."""
    wanted: tuple[str, ...] = ()
    """Versions that calls wait for and no server holds."""
    recent: tuple[str, ...] = ()
    """Versions that calls used in the last minute, the latest first."""
    in_flight: dict[str, tuple[str, ...]] = {}
    """For each replica, the versions that calls are using now."""


def replica_name(url: str) -> str:
    """Return the name of the inference server at `url`, which is the host and port of the URL."""
    return url.partition("://")[2].rstrip("/")


def sampler_key(project: str, replica: str) -> str:
    """Return the key of a server's record. `*` as `replica` stands for all."""
    return f"sampler.{_token(project)}.{_token(replica)}"


def gateway_key(project: str, gateway: str) -> str:
    """Return the key of a gateway's record. `*` as `gateway` stands for all."""
    return f"gateway.{_token(project)}.{_token(gateway)}"


def _token(name: str) -> str:
    """Return `name` with only the characters that NATS clients accept in a key."""
    return (
        name
        if name == "*"
        else quote(name, safe="").replace(".", "%2E").replace("~", "%7E").replace("%", "=")
    )
