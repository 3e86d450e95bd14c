"""The connections of one server, and the limits that hold for all of them together."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Generic, Protocol, TypeVar

import msgspec

from pipeline.config import ConfigError, HttpConfig
from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.http.server")

_OTHER_FILES = 128
"""File descriptors that the process needs for anything but connections."""


def checked_limits(config: HttpConfig) -> HttpConfig:
    """Raise the process's limit of open files to its hard limit, and lower `max_connections` to what that allows.

    A client's connection may need another one to an inference server. Raises `ConfigError` if one body may be larger
    than all bodies together."""
    if config.max_buffered_bytes < config.max_body_bytes:
        raise ConfigError(
            f"gateway.http.max_buffered_bytes ({config.max_buffered_bytes}) is less than "
            f"gateway.http.max_body_bytes ({config.max_body_bytes}): raise the first or lower the second"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    possible = max(1, (soft - _OTHER_FILES) // 2)
    if soft == resource.RLIM_INFINITY or possible >= config.max_connections:
        return config
    log.warning("fewer connections than gateway.http.max_connections", connections=possible, open_files=soft)
    return msgspec.structs.replace(config, max_connections=possible)


class PooledConnection(Protocol):
    """A connection as the pool sees it."""

    buffered: int
    """Bytes of its incomplete body that are counted in `ConnectionPool.buffered`."""
    owner: str
    """The name of the API key that sends that body."""

    def abort(self) -> None:
        """Close the connection at once and ignore further input."""

    def reject_body(self) -> None:
        """Refuse the request whose body is being read."""


_C = TypeVar("_C", bound=PooledConnection)


class ConnectionPool(Generic[_C]):
    """Connections by state: idle, reading a request, or answering one."""

    def __init__(self, limits: HttpConfig) -> None:
        self.limits = limits
        self.connections: set[_C] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """The handlers that run."""
        self.closing = False
        """The server stops: every connection ends with its next answer."""
        self.buffered = 0
        """Bytes of all incomplete bodies."""
        self._idle: dict[_C, None] = {}
        """Connections without a request, longest idle first."""
        self._reading: dict[_C, None] = {}
        """Connections with an incomplete request, oldest first."""

    def add(self, connection: _C) -> bool:
        """Add a new connection. At the limit, close the longest idle connection for it, or else the one that has been
        reading a request longest. Returns false if all connections are being answered."""
        if len(self.connections) >= self.limits.max_connections:
            oldest = next(iter(self._idle), None) or next(iter(self._reading), None)
            if oldest is None:
                return False
            self.remove(oldest)
            oldest.abort()
        self.connections.add(connection)
        self._idle[connection] = None
        return True

    def remove(self, connection: _C) -> None:
        self.connections.discard(connection)
        self.set_answering(connection)

    def set_idle(self, connection: _C) -> None:
        self._idle[connection] = None

    def set_reading(self, connection: _C) -> None:
        self._idle.pop(connection, None)
        self._reading[connection] = None

    def set_answering(self, connection: _C) -> None:
        self._idle.pop(connection, None)
        self._reading.pop(connection, None)

    def count_body(self, connection: _C, size: int) -> None:
        """Count `size` bytes for the incomplete body of `connection`. While all incomplete bodies together exceed
        `limits.max_buffered_bytes`, refuse the newest request of the owner whose bodies are the largest together: an
        owner that fills the limit with bodies that never end holds up itself."""
        self.buffered += size - connection.buffered
        connection.buffered = size
        for _ in range(len(self._reading)):
            if self.buffered <= self.limits.max_buffered_bytes:
                return
            sums: Counter[str] = Counter()
            newest: dict[str, _C] = {}
            for reading in self._reading:
                if reading.buffered:
                    sums[reading.owner] += reading.buffered
                    newest[reading.owner] = reading
            if not sums:
                return
            newest[sums.most_common(1)[0][0]].reject_body()
