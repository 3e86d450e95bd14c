"""The HTTP server alone: real sockets, raw bytes."""

from __future__ import annotations

import re

import anyio
import anyio.abc
import h11
import httpx
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollout_gateway.http.errors import ClientGoneError
from rollout_gateway.http.request import Request, header_line
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
        request.start(200, ())
        for piece in (b"one", b"", b"two"):
            request.write(piece)
            await anyio.lowlevel.checkpoint()
        request.end()

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
        assert request.gone
        request.answer(200, b"no one reads this")
        ended.set()

    async with serve(slow) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await begun.wait()
        with anyio.fail_after(60):
            await ended.wait()


async def test_a_slow_reader_stops_the_source() -> None:
    stopped, released = anyio.Event(), anyio.Event()
    size = 0

    async def flood(request: Request) -> None:
        nonlocal size
        request.on_flow = lambda stop: stopped.set() if stop else released.set()
        request.start(200, ())
        while not stopped.is_set():
            request.write(b"x" * 65536)
            size += 65536
            await anyio.lowlevel.checkpoint()
        await released.wait()
        request.end()

    async with serve(flood) as port, httpx.AsyncClient() as client:
        async with client.stream("GET", f"http://127.0.0.1:{port}/") as reply:
            await stopped.wait()
            assert not released.is_set()
            assert len(await reply.aread()) == size
        assert released.is_set()


async def test_a_fault_of_the_handler_is_a_500_and_the_next_request_is_answered() -> None:
    async def faulty(request: Request) -> None:
        if request.target == "/bad":
            raise RuntimeError("a fault")
        request.answer(200, b"fine")

    async with serve(faulty) as port, httpx.AsyncClient() as client:
        bad = await client.get(f"http://127.0.0.1:{port}/bad")
        assert (bad.status_code, bad.json()["error"]["code"]) == (500, "internal_error")
        assert (await client.get(f"http://127.0.0.1:{port}/good")).text == "fine"


@given(st.binary(max_size=20), st.binary(max_size=20))
@example(b"x-types", b"a\r\n\r\nHTTP/1.1 200 OK")
@example(b"x", b"a\n")
@example(b"!: ", b"")
def test_a_header_is_one_line_or_refused(name: bytes, value: bytes) -> None:
    assume(
        name.lower() not in (b"content-length", b"transfer-encoding")
    )  # the reader judges their values, too
    try:
        line = header_line(name, value)
    except ValueError:
        assert not re.fullmatch(rb"[a-z-]+", name) or re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", value)
        return
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    reader.receive_data(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n" + line + b"\r\n")
    reply = reader.next_event()
    assert isinstance(reply, h11.Response)
    assert [(n, v) for n, v in reply.headers if n != b"content-length"] == [
        (name.lower(), value.strip(b" \t"))
    ]


async def test_an_answer_with_an_invalid_header_is_a_500_and_nothing_of_it_is_sent() -> None:
    async def splitting(request: Request) -> None:
        header = (b"x-types", b"a\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nforged")
        if request.target == "/stream":
            request.start(200, (header,))
        else:
            request.answer(200, b"{}", (header,))

    async with serve(splitting) as port:
        for path in (b"/", b"/stream"):
            head = b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            said = await spoken(port, head)
            assert said.startswith(b"HTTP/1.1 500 ")
            assert b"forged" not in said


async def test_running_calls_end_before_the_server_stops() -> None:
    begun, go = anyio.Event(), anyio.Event()
    replies: list[httpx.Response] = []

    async def slow(request: Request) -> None:
        begun.set()
        await go.wait()
        request.answer(200, b"done")

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
