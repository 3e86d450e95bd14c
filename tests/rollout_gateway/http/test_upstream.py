"""The client for inference servers: its key, its timeouts, and servers that end a connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from rollout_gateway.http.upstream import Upstream, UpstreamError, UpstreamTimeoutError


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://a/x y", ""),
        ("http://a/\x0b", ""),
        ("http://a\x0b/", ""),
        ("http://a", "k\r\nX: y"),
        ("http://a:70000", ""),
        ("http://a:b@c", "k"),
        ("ftp://a", ""),
        ("http://", ""),
    ],
)
async def test_a_url_or_key_that_can_not_be_sent_is_refused(url: str, key: str) -> None:
    with pytest.raises(ValueError):
        Upstream(url, api_key=key)


@asynccontextmanager
async def served(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], key: str = ""
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
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key=key)
        try:
            yield upstream
        finally:
            await upstream.close()
            await asyncio.gather(*(handler for handler in handlers if handler is not None))


async def test_the_api_key_goes_with_every_request_and_into_no_error() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    for key in ("sk-secret", ""):
        async with served(answer, key) as upstream:
            for _ in range(2):
                assert await upstream.fetch("GET", "/v1/models") == (200, b"{}")
    assert [b"Authorization: Bearer sk-secret\r\n" in head for head in heads] == [True, True, False, False]
    nobody = Upstream("http://127.0.0.1:9", api_key="sk-secret")
    with pytest.raises(UpstreamError) as caught:
        await nobody.fetch("GET", "/v1/models")
    await nobody.close()
    assert not caught.value.sent
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_reply_that_is_not_complete_in_time_is_a_timeout(said: bytes) -> None:
    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()  # until the client ends the connection

    async with served(hear) as upstream, asyncio.timeout(60):
        with pytest.raises(UpstreamTimeoutError):
            await upstream.fetch("GET", "/v1/models", timeout_s=0.3)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_reply_that_breaks_off_is_an_error_and_not_asked_for_again(chunked: bool) -> None:
    heads = 0

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heads
        await reader.readuntil(b"\r\n\r\n")
        heads += 1
        coding = b"transfer-encoding: chunked\r\n\r\n4\r\n" if chunked else b"content-length: 9\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + coding + b"half")

    async with served(break_off) as upstream:
        reply = await upstream.request("POST", "/v1/chat/completions", b"{}")
        assert await reply.read_some() == b"half"
        with pytest.raises(UpstreamError, match="broke"):
            await reply.read_some()
        reply.close()
    assert heads == 1


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


async def test_a_request_whose_pooled_connection_ends_is_sent_on_a_new_one() -> None:
    """The server ends each connection with the second request on it, unanswered."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await reader.readuntil(b"\r\n\r\n")

    async with served(answer) as upstream:
        for _ in range(4):
            assert await upstream.fetch("POST", "/v1/chat/completions", timeout_s=60.0) == (200, b"{}")
