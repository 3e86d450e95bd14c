"""Errors that a command prints as one line: `ConfigError` for settings, `BrokerError` and subclasses for the log. What
other programs say in errors goes into logs by `without_sent`."""

from __future__ import annotations

import re

import msgspec

_REPEATED = 12
"""Letters and digits in a row that an error shares with the text that was sent, from which on it counts as a quotation.
Shorter words occur in any text."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, msgspec.MsgspecError)
"""What code raises that reads a document of another program which has not the expected form."""


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


class HistoryGoneError(BrokerError):
    """The log no longer holds something that can be used. The message names it, and what to do (`advice`)."""

    def __init__(
        self, what: str, advice: str = "is no longer in the log: raise the stream's retention or replay from the store"
    ) -> None:
        super().__init__(f"{what} {advice}")


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in an exception group, at any depth; a single error as a list of one."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def without_sent(message: str, sent: str) -> str:
    """Return the message of another program's error for a log or an event, in which no text of a run may stand. If it
    repeats 12 letters and digits of `sent`, the text that the program was sent, return a remark in its place."""
    letters, sent_letters = _letters(message), _letters(sent)
    repeats = any(letters[i : i + _REPEATED] in sent_letters for i in range(len(letters) - _REPEATED + 1))
    return "its message repeats the text that it was sent" if repeats else message


def _letters(text: str) -> str:
    """Return the letters and digits of a text, without spaces, punctuation and escapes of JSON or Python. Of an escape
    `\\uXXXX` the character stays."""
    return re.sub(r"\\u([0-9a-f]{4})|\\[a-z]|[\W_]+", lambda m: chr(int(m[1], 16)) if m[1] else "", text)
