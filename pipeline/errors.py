"""Errors that are told in a line: `ConfigError` for settings, `BrokerError` and below for access to the log."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that can't be used; the message names it."""


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


class UndecodableError(HistoryGoneError):
    """A message that lies in the log and is no event of this version; it is among the dead letters."""

    def __init__(self, stream: str, seq: int) -> None:
        BrokerError.__init__(
            self, f"message {seq} of {stream} is no event of this version: see `journeyman dead list`"
        )
        self.what = f"message {seq} of {stream}"


class StreamMissingError(BrokerError):
    """The server has no such stream."""

    def __init__(self, stream: str) -> None:
        super().__init__(f"the log has no stream {stream}: start `journeyman up` on it once")
        self.stream = stream
