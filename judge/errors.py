"""Errors that several rooms of the judge raise."""


class UnscoredError(Exception):
    """No judge could score the group; the message says why."""
