"""Inference servers that a whole session shares. If one ends, the test that runs then fails and says how, and the
server starts again for those that follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import VllmServer

_running: list[VllmServer] = []


def run(server: VllmServer, given: str | None = None) -> Iterator[VllmServer]:
    """Run a server for a session fixture, unless one was `given`."""
    if not given:
        server.start()
        _running.append(server)
    yield server
    if not given:
        _running.remove(server)
    server.stop()


def revive() -> str:
    """Start those servers again that have ended. Return how they ended, with the ends of their logs."""
    said = ""
    for server in _running:
        if server.process is not None and (code := server.process.poll()) is not None:
            log = (server.folder / "vllm.log").read_text("utf-8", "replace")[-4000:]
            said += f"the shared server at {server.url} ended with status {code}; its log ends:\n{log}\n"
            server.start()
    return said


class Watch:
    """A plugin of pytest that looks after each test."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        ended = revive()  # what the test's fixtures undo needs the server
        try:
            yield
        finally:
            if ended:
                pytest.fail(ended, pytrace=False)
