"""Splits what an inference server or a provider streams into server-sent events."""

from __future__ import annotations

import re

from rollout_gateway.http.upstream import UpstreamError

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_EVENT_BYTES = 64 * 2**20
"""A stream with a longer event is broken off."""


class EventBuffer:
    """Collects the parts of a stream, as they come from the socket, into whole events."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The beginning of an event whose end has not come."""

    def add(self, data: bytes) -> list[bytes]:
        """Add the next part of the stream. Returns the events that are whole now, each with the blank line behind it.
        Raises `UpstreamError` for an event of more than 64 MiB."""
        # An event's end has up to four bytes, which may lie across two parts. What is before was searched already.
        events, start, searched = list[bytes](), 0, max(0, len(self.rest) - 3)
        self.rest += data
        for end in _EVENT_END.finditer(self.rest, searched):
            events.append(bytes(self.rest[start : end.end()]))
            start = end.end()
        self.rest = self.rest[start:] if start else self.rest
        if len(self.rest) > _EVENT_BYTES:
            raise UpstreamError(f"an event is longer than {_EVENT_BYTES >> 20} MiB")
        return events


def event_data(event: bytes) -> bytes:
    """Return the data of an event without its other fields and comments, on one line, since it is JSON."""
    lines = event.removeprefix(b"\xef\xbb\xbf").splitlines()
    return b" ".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])
