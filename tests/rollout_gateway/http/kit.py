"""Helpers for HTTP tests: a server of a handler, raw requests, and chunked replies without a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import anyio
import anyio.abc

from pipeline.config import HttpConfig
from rollout_gateway.http.connection import Admit, Handler
from rollout_gateway.http.request import Request
from rollout_gateway.http.server import run_server
from rollout_gateway.http.upstream_connection import UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@asynccontextmanager
async def serve(handler: Handler, admit: Admit = lambda _: None, **limits: Any) -> AsyncIterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        bounds = HttpConfig(**{"max_body_bytes": 1000, **limits})
        async with run_server(handler, listener, bounds, grace_s=5, admit=admit, cut_off=lambda: None):
            yield listener.getsockname()[1]


async def echo(request: Request) -> None:
    if request.too_large:
        request.answer(413, b"too large")
        return
    request.answer(200, request.method.encode() + b" " + request.target.encode() + b" " + request.body)


async def spoken(port: int, *portions: bytes) -> bytes:
    """What the server says to `portions` until it closes."""
    out = b""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for portion in portions:
            await stream.send(portion)
        try:
            while True:
                out += await stream.receive()
        except anyio.EndOfStream:
            return out


def framed(*pieces: bytes) -> bytes:
    """Pieces of a body in HTTP's chunked coding."""
    return b"".join([b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces])


def unframed(chunks: bytes) -> bytes:
    """The body that whole chunks are."""
    out = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        out.append(rest[:length])
        chunks = rest[length + 2 :]
    return b"".join(out)


def portions(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def piped(
    arriving: Iterable[bytes], sink: Callable[[bytes], None], cutter: Callable[[bytes], int] | None
) -> UpstreamConnection:
    """A connection on which the head of a reply came, then each of `arriving`, without a socket."""

    async def run() -> UpstreamConnection:
        connection = UpstreamConnection(lambda _: None)
        connection.connection_made(Mock(spec=asyncio.Transport))
        connection.deadline = 0.0  # it was asked for something
        connection.data_received(HEAD)
        connection.sink, connection.cutter = sink, cutter
        for data in arriving:
            connection.data_received(data)
        return connection

    return asyncio.run(run())
