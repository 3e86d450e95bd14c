"""The errors that a user of the dashboard sees."""

from __future__ import annotations


class PageError(Exception):
    """A request that is refused or that fails: an HTTP status, and a sentence that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SignInError(PageError):
    """A request of nobody who has signed in."""
