"""The HTTP server alone: real sockets, raw bytes."""

from __future__ import annotations

import anyio
import anyio.abc
import httpx
import pytest

from rollout_gateway.http.errors import ClientGoneError
from rollout_gateway.http.request import Request
from tests.rollout_gateway.http.kit import echo, serve, spoken

pytestmark = pytest.mark.anyio


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    last = (
        b"POST /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    )
    asked = (
        b"GET /a?q=1 HTTP/1.1\r\nHost: x\r\n\r\nPOST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        + last
    )
    async with serve(echo) as port:
        whole = await spoken(port, asked)
        bodies = [part.split(b"\r\n\r\n")[1] for part in whole.split(b"HTTP/1.1 200 OK\r\n")[1:]]
        assert bodies == [b"GET /a?q=1 ", b"POST /b abc", b"POST /c hello"]
        assert await spoken(port, *(asked[i : i + 1] for i in range(len(asked)))) == whole


async def test_requests_sent_ahead_without_end_are_not_kept() -> None:
    """32 are answered, and the connection ends."""
    async with serve(echo) as port:
        whole = await spoken(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3000)
    assert whole.count(b"HTTP/1.1 200 OK\r\n") == 32


async def test_a_body_that_is_too_long_is_refused_and_the_connection_ends() -> None:
    async with serve(echo) as port:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n"
        assert (await spoken(port, head)).startswith(b"HTTP/1.1 413 ")
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await spoken(port, head, b"7d0\r\n" + b"x" * 2000)).startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_asks_to_go_on_is_told_to() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    async with serve(echo) as port:
        assert (await spoken(port, head, b"ok")).startswith(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"
        )


async def test_a_stream_ends_as_its_version_of_http_wants_it() -> None:
    async def stream(request: Request) -> None:
        await request.start(())
        for piece in (b"one", b"", b"two"):
            await request.write(piece)
            await anyio.lowlevel.checkpoint()
        await request.end()

    async with serve(stream) as port, httpx.AsyncClient() as client:
        for _ in range(2):
            assert (await client.get(f"http://127.0.0.1:{port}/")).text == "onetwo"
        assert (await spoken(port, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nonetwo")


async def test_a_client_that_leaves_is_noticed_and_the_handler_runs_on() -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def slow(request: Request) -> None:
        begun.set()
        with pytest.raises(ClientGoneError), request.cancellation:
            await anyio.sleep_forever()
        await request.answer(200, b"no one reads this")
        ended.set()

    async with serve(slow) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await begun.wait()
        with anyio.fail_after(60):
            await ended.wait()


async def test_a_slow_reader_stops_the_source() -> None:
    written, parts = 0, 1000

    async def flood(request: Request) -> None:
        nonlocal written
        await request.start(())
        for _ in range(parts):
            await request.write(b"x" * 65536)
            written += 1
        await request.end()

    async with (
        serve(flood) as port,
        httpx.AsyncClient() as client,
        client.stream("GET", f"http://127.0.0.1:{port}/") as reply,
    ):
        before = -1
        while before != written:
            before = written
            await anyio.sleep(0.1)
        assert written < parts
        assert len(await reply.aread()) == parts * 65536


async def test_a_fault_of_the_handler_is_a_500_and_the_next_request_is_answered() -> None:
    async def faulty(request: Request) -> None:
        if request.target == "/bad":
            raise RuntimeError("a fault")
        await request.answer(200, b"fine")

    async with serve(faulty) as port, httpx.AsyncClient() as client:
        bad = await client.get(f"http://127.0.0.1:{port}/bad")
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal_error")
        assert (await client.get(f"http://127.0.0.1:{port}/good")).text == "fine"


@pytest.mark.parametrize(
    "header",
    [
        (b"x-types", b"a\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nforged"), (b"x", b"a\n"),
        (b"!: ", b""), (b"x: forged", b""), (b"x\r\nforged", b""), (b"x", b"\0"),
    ],
)  # fmt: skip
async def test_nothing_is_sent_of_an_answer_with_an_invalid_header(header: tuple[bytes, bytes]) -> None:
    """It is an error of the gateway, so it is on its log, and the connection ends."""

    async def splitting(request: Request) -> None:
        if request.target == "/stream":
            await request.start((header,))
        else:
            await request.answer(200, b"{}", (header,))

    async with serve(splitting) as port:
        for path in (b"/", b"/stream"):
            head = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert await spoken(port, head) == b""


async def test_running_calls_end_before_the_server_stops() -> None:
    begun, go = anyio.Event(), anyio.Event()
    replies: list[httpx.Response] = []

    async def slow(request: Request) -> None:
        begun.set()
        await go.wait()
        await request.answer(200, b"done")

    async def ask(port: int) -> None:
        async with httpx.AsyncClient() as client:
            replies.append(await client.get(f"http://127.0.0.1:{port}/"))

    async with anyio.create_task_group() as tg, serve(slow) as port:
        tg.start_soon(ask, port)
        await begun.wait()
        tg.start_soon(_soon, go)
    # The connection ends with this answer: a client that did not know would send its next request into a closed one.
    assert [(r.text, r.headers.get("connection")) for r in replies] == [("done", "close")]


async def _soon(event: anyio.Event) -> None:
    await anyio.lowlevel.checkpoint()
    event.set()
