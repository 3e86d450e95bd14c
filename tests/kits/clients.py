"""Synchronous clients of a server that live as long as a test."""

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


Client = TypeVar("Client", bound=Closable)

OPEN: list[Closable] = []
"""What `tests/conftest.py` closes when the test ends that made it."""


def closed_after_test(client: Client) -> Client:
    """Return `client`, which is closed when the running test ends."""
    OPEN.append(client)
    return client
