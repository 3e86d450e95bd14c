"""Errors that a command prints as one line: `ConfigError` for settings, `BrokerError` and subclasses for the log."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it."""


class BrokerError(Exception):
    """Base class of the errors of the log."""


class BrokerUnavailableError(BrokerError):
    """The NATS server did not answer in time."""


class LogShrankError(BrokerError):
    """The log lost its end, as in a power cut. What was read of it is wrong: the service ends, and its next start reads
    the log anew."""


class StreamMissingError(BrokerError):
    """The server has no such stream."""

    def __init__(self, stream: str) -> None:
        super().__init__(f"the log has no stream {stream}: run `journeywork up` on it once")
        self.stream = stream


class HistoryGoneError(BrokerError):
    """The log no longer holds something; `what` names it."""

    def __init__(self, what: str, advice: str = "") -> None:
        advice = advice or "is no longer in the log: raise the stream's retention or replay from the store"
        super().__init__(f"{what} {advice}")
        self.what = what


class UndecodableError(HistoryGoneError):
    """A message of the log is no event of this version. It is among the dead letters."""

    def __init__(self, stream: str, seq: int) -> None:
        super().__init__(
            f"message {seq} of {stream}", "is no event of this version: see `journeywork dead list`"
        )


class OtherEventError(HistoryGoneError):
    """An event of another class lies at a sequence, as after a power cut that took the end of the stream."""

    def __init__(self, stream: str, seq: int, expected: str) -> None:
        super().__init__(f"the {expected} at message {seq} of {stream}")
