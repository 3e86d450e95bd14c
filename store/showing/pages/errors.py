"""What a reader asked for and can't get. The messages are for users."""

from __future__ import annotations


class ReadingError(Exception):
    """Base of these errors. `status`: that of an HTTP answer."""

    status = 500


class NotFoundError(ReadingError):
    """The history has no such thing."""

    status = 404


class InvalidQueryError(ReadingError):
    """A filter, an order or a number of a page has a value that it can't have."""

    status = 400
