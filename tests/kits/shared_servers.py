"""Inference servers that a whole session shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import VllmServer


def run(server: VllmServer, given: str | None = None) -> Iterator[VllmServer]:
    """Run a server for a session fixture, unless one was `given`."""
    if not given:
        server.start()
    yield server
    server.stop()
