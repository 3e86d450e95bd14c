"""The client for inference servers: a body in chunks, in whatever portions it arrives, with and without a cutter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_gateway.http.upstream import Upstream, UpstreamError, UpstreamTimeoutError
from rollout_gateway.http.upstream_connection import UpstreamConnection
from tests.rollout_gateway.http.kit import END, framed, piped, portions

PIECE = st.binary(min_size=1, max_size=20) | st.sampled_from(
    [b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"data: x\n\n", b"1\r"]
)
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


@given(st.lists(PIECE, min_size=1, max_size=12), st.integers(1, 60), st.lists(st.integers(0, 3), min_size=1))
def test_what_a_cutter_takes_and_what_it_leaves_are_the_body_in_order(
    pieces: list[bytes], size: int, appetite: list[int]
) -> None:
    got: list[bytes] = []
    asked = iter(appetite * 1000)

    def cutter(data: bytes) -> int:
        at = 0
        for _ in range(next(asked)):
            begun = _CHUNK.match(data, at)
            if begun is None:
                break
            end = begun.end() + int(begun[1], 16) + 2
            if end > len(data) or begun[1] == b"0":
                break
            assert data[end - 2 : end] == b"\r\n"
            got.append(data[begun.end() : end - 2])
            at = end
        # It is asked only where a chunk begins.
        assert re.match(rb"[0-9a-f]+(\r(\n|$)|$)", data) is not None
        return at

    connection = piped(portions(framed(*pieces) + END, size), got.append, cutter)
    assert b"".join(got) == b"".join(pieces)
    assert connection.done
    assert connection.error is None
    assert connection.keep_alive


def test_a_cutters_fault_is_raised_where_the_body_is_read() -> None:
    def cutter(data: bytes) -> int:
        raise RuntimeError("cut")

    connection = piped([framed(b"a"), framed(b"b"), END], lambda _: None, cutter)
    assert isinstance(connection.error, RuntimeError)
    assert not connection.done


def test_what_is_no_chunk_after_a_cut_is_an_error() -> None:
    connection = piped([framed(b"a"), b"no chunk"], lambda _: None, lambda _: 0)
    assert isinstance(connection.error, UpstreamError)


def test_the_api_key_goes_with_every_request_and_into_no_error() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with_key = Upstream(f"http://127.0.0.1:{port}", api_key="sk-secret")
            without = Upstream(f"http://127.0.0.1:{port}")
            for upstream in (with_key, with_key, without):
                assert await upstream.fetch("GET", "/v1/models") == (200, b"{}")
            with_key.close()
            without.close()
        with pytest.raises(UpstreamError) as caught:
            await Upstream("http://127.0.0.1:9", api_key="sk-secret").fetch("GET", "/v1/models")
        assert "sk-secret" not in str(caught.value)

    asyncio.run(run())
    assert [b"Authorization: Bearer sk-secret\r\n" in head for head in heads] == [True, True, False]


@pytest.mark.anyio
@pytest.mark.parametrize(("url", "key"), [
    ("http://a/x y", ""), ("http://a/\x0b", ""), ("http://a\x0b/", ""), ("http://a", "k\r\nX: y"),
])  # fmt: skip
async def test_a_url_or_key_that_would_change_a_requests_head_is_refused(url: str, key: str) -> None:
    with pytest.raises(ValueError):
        Upstream(url, api_key=key)


@asynccontextmanager
async def served(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Upstream]:
    """A client of a server that handles each connection with `answer`. Both have ended when the block has."""
    handlers: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                await answer(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield upstream
        finally:
            upstream.close()
            await asyncio.gather(*(handler for handler in handlers if handler is not None))


@pytest.mark.anyio
async def test_a_request_that_waited_long_for_its_connection_has_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(hear) as upstream:
        connect = upstream._connect

        async def connect_late(timeout_s: float) -> UpstreamConnection:
            while upstream._timer is not None:  # a check that finds no request in progress
                await asyncio.sleep(0.01)
            return await connect(timeout_s)

        monkeypatch.setattr(upstream, "_connect", connect_late)
        async with asyncio.timeout(60):
            with pytest.raises(UpstreamTimeoutError):
                await upstream.fetch("GET", "/v1/models", timeout_s=1.0)


@pytest.mark.anyio
async def test_a_request_reaches_a_server_that_dies_of_it_twice_at_most() -> None:
    posts, together = 0, asyncio.Barrier(10)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal posts
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            await together.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        posts += head.startswith(b"POST")

    async with served(answer) as upstream:
        await asyncio.gather(*[upstream.fetch("GET", "/v1/models", timeout_s=60.0) for _ in range(10)])
        with pytest.raises(UpstreamError) as caught:
            await upstream.fetch("POST", "/v1/chat/completions", b"{}", timeout_s=60.0)
        assert caught.value.sent
        assert posts == 2
