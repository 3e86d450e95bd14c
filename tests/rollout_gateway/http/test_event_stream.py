"""Events of a stream, whose splitting `dialects/test_streams.py` holds for portions of any size and any line end."""

import time

import pytest

from rollout_gateway.http.event_stream import EventBuffer
from rollout_gateway.http.upstream import UpstreamError


def test_long_event_is_searched_once_and_has_a_bound() -> None:
    buffer, part, started = EventBuffer(), b"x" * 4096, time.process_time()
    for _ in range(2048):
        assert not buffer.add(part)
    assert time.process_time() - started < 2
    with pytest.raises(UpstreamError, match="an event is longer than 64 MiB"):
        buffer.add(bytes(60 * 2**20))
