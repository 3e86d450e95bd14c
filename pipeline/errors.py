"""What access to the log raises: `BrokerError` and below; each says what to do."""

from __future__ import annotations


class BrokerError(Exception):
    """Root of what the broker raises."""


class BrokerUnavailableError(BrokerError):
    """The server did not acknowledge in time."""


class HistoryGoneError(BrokerError):
    """Something the log once held is there no more; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is no longer in the log: raise the stream's retention or replay from the store"
        )
        self.what = what
