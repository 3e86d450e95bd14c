"""Hostile and unusual clients at the HTTP server alone: real sockets, raw bytes."""

import json
import resource
import socket
from contextlib import AsyncExitStack

import anyio.abc
import pytest

from pipeline.config import ConfigError, HttpConfig
from rollout_gateway.http.errors import ClientGoneError
from rollout_gateway.http.request import Request
from rollout_gateway.http.server import checked_limits
from tests.rollout_gateway.http.kit import echo, received, serve, spoken, until_closed

INNER = b"POST /pin HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def answers(said: bytes) -> list[bytes]:
    """Status code and body of each final response."""
    parts = said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 ")[1:]
    return [part[:3] + b" " + part.partition(b"\r\n\r\n")[2] for part in parts]


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_is_ignored_and_its_body_is_a_body(protocol: str, chunked: bool) -> None:
    """The body holds a request, and must be read as bytes. The connection ends with the answer."""
    upgrade = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\n".encode()
    if chunked:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Transfer-Encoding: chunked\r\n\r\n"
        sent = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
    else:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Content-Length: %d\r\n\r\n" % len(INNER)
        sent = head + INNER
    bare = b"GET /b HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
    async with serve(echo) as port:
        for portions in ([sent], [sent + INNER], [sent[i : i + 1] for i in range(len(sent))]):
            said = await spoken(port, *portions)
            assert answers(said) == [b"200 POST /a " + INNER]
            assert b"connection: close\r\n" in said
        assert answers(await spoken(port, bare)) == [b"200 GET /b "]
        assert answers(await spoken(port, bare + INNER)) == [b"200 GET /b "]


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"nonsense\r\n\r\n", b"400", "bad_http"),
        (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", b"400", "bad_http"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"505", "bad_http"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400", "no_host"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"400", "bad_http"),
        (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", b"400", "bad_http"),
        (INNER.replace(b"h: 0", b"h: " + b"0" * 5000), b"400", "bad_http"),
        (INNER.replace(b"h: 0", b"h: " + b"9" * 5000), b"400", "bad_http"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, b"431", "headers_too_large"),
        (CHUNKED.replace(b"chunked", b"gzip"), b"501", "unsupported_transfer_encoding"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n" + INNER, b"405", "method_not_allowed"),
    ],
)
async def test_a_refused_request_gets_a_code_and_a_sentence(head: bytes, status: bytes, code: str) -> None:
    async with serve(echo) as port:
        (answer,) = answers(await spoken(port, head))
    error = json.loads(answer[4:])["error"]
    assert (answer[:3], error["code"], error["message"][-1]) == (status, code, ".")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nA: " + b"y" * 100_000, b"0\r\n" + b"a: b\r\n" * 20_000, b"1;" + b"e" * 100_000],
    ids=["one trailer", "many trailers", "chunk extension"],
)
async def test_what_is_no_body_is_counted(endless: bytes) -> None:
    async with serve(echo) as port:
        said = await spoken(port, CHUNKED, *(endless[i : i + 10_000] for i in range(0, len(endless), 10_000)))
    assert [a[:3] for a in answers(said)] == [b"431"]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("ahead", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_headers_have_one_limit(many: bool, ahead: bytes) -> None:
    """However many bytes of them arrive at once."""

    def head(size: int) -> bytes:
        lines = b"a: b\r\n" * (size // 6) if many else b"a: " + b"b" * (size - 5) + b"\r\n"
        return b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n"

    async with serve(echo) as port:
        taken = [a[:3] for a in answers(await spoken(port, ahead + head(65_000)))]
        refused = [a[:3] for a in answers(await spoken(port, ahead + head(66_000)))]
    assert taken == ([b"200", b"200"] if ahead else [b"200"])
    assert refused == ([b"200"] if ahead else [b"431"])  # the answer to an earlier request is the last one


async def test_absolute_target_is_split_at_its_path_or_query() -> None:
    async with serve(echo) as port:
        for target, path in ((b"/a?b=/c", b"/a?b=/c"), (b"?b=/c", b"/?b=/c"), (b"", b"/")):
            said = await spoken(port, b"GET http://x%b HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n" % target)
            assert answers(said) == [b"200 GET " + path + b" "]


async def test_repeated_headers_are_joined_and_trailers_are_dropped() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def look(request: Request) -> None:
        seen.append(request.headers)
        await echo(request)

    more = b"\r\nAuthorization: Bearer agent\r\nAnthropic-Beta: a\r\nConnection: close\r\nAnthropic-Beta: b \r\n\r\n"
    trailers = b"2\r\nok\r\n0\r\nAuthorization: Bearer boss\r\nX-Api-Key: boss\r\n\r\n"
    async with serve(look) as port:
        assert answers(await spoken(port, CHUNKED.replace(b"\r\n\r\n", more) + trailers)) == [b"200 POST /a ok"]
    (headers,) = seen
    assert (headers[b"authorization"], b"x-api-key" in headers) == (b"Bearer agent", False)
    assert headers[b"anthropic-beta"] == b"a, b"


async def test_a_header_that_says_whose_a_request_is_comes_once() -> None:
    async with serve(echo) as port:
        for line in (b"Host: y", b"Authorization: a\r\nauthorization: b", b"X-Api-Key: a\r\nX-Api-Key: b"):
            said = await spoken(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n" + INNER)
            assert [a[:3] for a in answers(said)] == [b"400"], line


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"identity, chunked", b"chunked, chunked", b"gzip", b"chunked\x0b", b"chunked x"]
)
async def test_a_transfer_coding_other_than_chunked_is_refused(coding: bytes) -> None:
    """And what follows it is not read as a request."""
    async with serve(echo) as port:
        said = await spoken(port, CHUNKED.replace(b"chunked", coding) + b"0\r\n\r\n" + INNER)
        assert [a[:3] for a in answers(said)] in ([b"501"], [b"400"]), said
        said = await spoken(port, CHUNKED.replace(b"chunked", b"Chunked") + b"0\r\n\r\n" + INNER)
        assert [a[:3] for a in answers(said)] == [b"200", b"200"]


async def test_a_body_in_a_great_many_small_chunks_is_refused() -> None:
    """Regression: twelve clients that sent a byte a chunk held up every other client for 28 seconds."""
    async with serve(echo, max_body_bytes=10_000_000) as port:
        said = await spoken(port, CHUNKED + b"1\r\nx\r\n" * 768 + b"0\r\n\r\n" + INNER)
        assert answers(said)[0] == b"200 POST /a " + b"x" * 768
        said = await spoken(port, CHUNKED + b"1\r\nx\r\n" * 200_000)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"chunks_too_small" in said


@pytest.mark.parametrize("leaves", ["half-closes", "closes", "closes behind requests sent ahead"])
async def test_a_client_that_leaves_ends_the_wait_of_its_handler_which_runs_on(leaves: str) -> None:
    """A client that half-closes and one that has left look the same."""
    working, ended = anyio.Event(), anyio.Event()

    async def slow(request: Request) -> None:
        working.set()
        with pytest.raises(ClientGoneError), request.cancellation:
            await anyio.sleep_forever()
        await request.answer(200, b"no one reads this")
        ended.set()

    async with serve(slow) as port:
        with anyio.fail_after(60):
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (3 if "ahead" in leaves else 1))
                await working.wait()
                await (client.send_eof() if leaves == "half-closes" else client.aclose())
                await ended.wait()


async def test_requests_sent_ahead_without_end_are_not_kept() -> None:
    """32 are answered, and the connection ends."""
    async with serve(echo) as port:
        whole = await spoken(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3000)
    assert whole.count(b"HTTP/1.1 200 OK\r\n") == 32


async def test_a_fault_of_the_handler_is_a_500_and_the_next_request_is_answered() -> None:
    async def faulty(request: Request) -> None:
        if request.target == "/bad":
            raise RuntimeError("a fault")
        await echo(request)

    async with serve(faulty) as port:
        bad, good = answers(await spoken(port, b"GET /bad HTTP/1.1\r\nHost: x\r\n\r\n" + INNER))
    assert (bad[:3], json.loads(bad[4:])["error"]["code"]) == (b"500", "internal_error")
    assert good == b"200 POST /pin "


@pytest.mark.parametrize(
    "header", [(b"x-types", b"a\r\ncontent-length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\nforged"), (b"x: forged", b"")]
)
async def test_nothing_is_sent_of_an_answer_with_an_invalid_header(header: tuple[bytes, bytes]) -> None:
    """It is an error of the gateway, so it is on its log, and the connection ends."""

    async def splitting(request: Request) -> None:
        if request.target == "/stream":
            await request.start((header,))
        else:
            await request.answer(200, b"{}", (header,))

    async with serve(splitting) as port:
        for path in (b"/", b"/stream"):
            assert await spoken(port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n") == b""


async def test_what_is_no_request_behind_one_leaves_its_answer_whole() -> None:
    async def streamed(request: Request) -> None:
        await request.start(())
        for piece in (b"one", b"two"):
            await request.write(piece)
            await anyio.lowlevel.checkpoint()
        await request.end()

    async with serve(streamed) as port:
        said = await spoken(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n" + INNER)
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")
        assert said.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        assert (await spoken(port, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\nonetwo")


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\nHost:", b"408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", b"408"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
    ],
    ids=["silent", "empty lines", "half a head", "half a body", "between two requests"],
)
async def test_a_connection_has_deadlines(sent: bytes, status: bytes) -> None:
    async with serve(echo, head_timeout_s=1.0, body_timeout_s=1.0, idle_timeout_s=1.0) as port:
        with anyio.fail_after(60):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                if sent:
                    await stream.send(sent)
                assert (await until_closed(stream))[9:12] == status


async def test_bytes_now_and_then_do_not_put_a_deadline_off() -> None:
    async with serve(echo, head_timeout_s=0.3) as port:
        with anyio.fail_after(60):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream, anyio.create_task_group() as tg:

                async def drip() -> None:
                    await stream.send(b"GET / HTTP/1.1\r\nA: ")
                    while True:
                        await anyio.sleep(0.05)  # a slow client's pace
                        await stream.send(b"y")

                tg.start_soon(drip)
                assert (await until_closed(stream))[9:12] == b"408"
                tg.cancel_scope.cancel()


async def test_the_oldest_idle_connection_makes_room() -> None:
    go = anyio.Event()

    async def slow(request: Request) -> None:
        if request.target == "/slow":
            await go.wait()
        await echo(request)

    async def connect(sent: bytes) -> anyio.abc.SocketStream:
        stream = await anyio.connect_tcp("127.0.0.1", port)
        await stream.send(sent)
        return stream

    get = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serve(slow, max_connections=3) as port:
        with anyio.fail_after(60):
            async with await connect(get % b"slow") as busy, await connect(get % b"1") as first:
                assert (await first.receive())[9:12] == b"200"
                async with await connect(b"GET / HTTP/1.1\r\n") as half, await connect(get % b"2") as second:
                    assert (await second.receive())[9:12] == b"200"
                    assert await until_closed(first) == b""  # it was idle; the one that is reading stayed
                    async with await connect(get % b"3") as third:
                        assert (await third.receive())[9:12] == b"200"
                        assert await until_closed(second) == b""
                        await third.send(get % b"slow")
                        async with await connect(get % b"slow") as fourth:
                            assert await until_closed(half) == b""  # none is idle: the oldest unfinished request
                            async with await anyio.connect_tcp("127.0.0.1", port) as fifth:
                                assert (await until_closed(fifth))[9:12] == b"503"  # all are being answered
                            go.set()
                            for stream in (busy, third, fourth):
                                assert (await stream.receive())[9:12] == b"200"


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    gone = anyio.Event()

    async def flood(request: Request) -> None:
        await request.start(())
        try:
            with request.cancellation:
                while True:
                    await request.write(b"x" * 65536)
        except ClientGoneError:
            gone.set()

    async with serve(flood, write_timeout_s=0.3) as port:
        with socket.create_connection(("127.0.0.1", port)) as client, anyio.fail_after(60):
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await gone.wait()


def test_a_process_that_may_open_few_files_takes_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert 1 < checked_limits(HttpConfig()).max_connections < 128
    assert "fewer connections" in caplog.text


# -- bodies of all connections together ------------------------------------------------------------------------------


SIZE, PART = 200_000, b"x" * 100_000


async def count(request: Request) -> None:
    request.owner = request.headers[b"x-owner"].decode()
    await request.read()
    await request.answer(200, b"%d" % len(request.body))


async def begun(port: int, stack: AsyncExitStack, owner: bytes = b"a") -> anyio.abc.SocketStream:
    """A request that is to have a body of `SIZE` bytes, of which none was sent yet."""
    stream = await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nX-Owner: %b\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    await stream.send(head % (owner, SIZE))
    assert await stream.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
    return stream


async def test_bodies_that_are_not_whole_have_a_bound_together() -> None:
    """The request that began last goes. What is whole, refused or left behind counts no more."""
    with anyio.fail_after(60):
        async with serve(count, max_body_bytes=SIZE, max_buffered_bytes=250_000) as port, AsyncExitStack() as stack:
            for _ in range(3):
                first, second, last = [await begun(port, stack) for _ in range(3)]
                for stream in (last, first, second):
                    await stream.send(PART)
                refused = await received(last, b"}}")
                assert refused.startswith(b"HTTP/1.1 503 "), refused
                assert b"retry-after: 1\r\n" in refused
                assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_bodies"
                await second.aclose()  # leaves in the middle of its body
                await first.send(PART)
                assert await received(first, b"200000")
                await first.aclose()
            whole = await begun(port, stack)
            await whole.send(PART + PART)
            assert await received(whole, b"200000")


async def test_an_owner_that_fills_the_bound_with_bodies_that_do_not_end_holds_up_itself() -> None:
    with anyio.fail_after(60):
        async with serve(count, max_body_bytes=SIZE, max_buffered_bytes=350_000) as port, AsyncExitStack() as stack:
            streams = [await begun(port, stack, owner) for owner in [b"attacker"] * 3 + [b"honest"]]
            for stream in streams:
                await stream.send(PART)
            assert (await streams[2].receive()).startswith(b"HTTP/1.1 503 ")
            await streams[3].send(PART)
            assert await received(streams[3], b"200000")


def test_a_body_has_to_fit_the_bound_of_all_together() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.http\.max_buffered_bytes"):
        checked_limits(HttpConfig(max_body_bytes=1000, max_buffered_bytes=999))


# -- refused by the head ---------------------------------------------------------------------------------------------


async def test_a_refused_request_is_told_so_before_its_body_is_kept() -> None:
    async def handler(request: Request) -> None:
        if b"authorization" not in request.headers:
            await request.answer(401, b"no")
            assert request.body == b""
            return
        await request.read()
        await request.answer(200, request.body)

    post = b"POST / HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
    async with serve(handler, max_body_bytes=10_000_000) as port:
        key = b"Authorization: a\r\nConnection: close\r\n"
        said = await spoken(port, post % (b"", 2) + b"no" + post % (key, 3) + b"yes")
        assert answers(said) == [b"401 no", b"200 yes"]  # a small body does not cost the connection
        # What is announced to be large, or becomes so, is refused while the client still sends.
        assert answers(await spoken(port, post % (b"", 9_000_000))) == [b"401 no"]
        assert answers(await spoken(port, CHUNKED, b"20000\r\n" + b"x" * 0x20000)) == [b"401 no"]
        expecting = post % (b"Expect: 100-continue\r\n", 9_000_000)
        assert (await spoken(port, expecting)).startswith(b"HTTP/1.1 401 ")
