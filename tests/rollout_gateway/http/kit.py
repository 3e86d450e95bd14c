"""Helpers for HTTP tests: a server of a handler, and raw requests."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import anyio.abc

from pipeline.config import HttpConfig
from rollout_gateway.http import request as request_module
from rollout_gateway.http.errors import ApiError, ClientGoneError
from rollout_gateway.http.request import Request
from rollout_gateway.http.server import Handler, run_server


@asynccontextmanager
async def serve(handler: Handler, **limits: Any) -> AsyncIterator[int]:
    """Run a server within the block, which answers an `ApiError` of the handler. Yields its port."""

    async def handle(request: Request) -> None:
        try:
            await handler(request)
        except ClientGoneError:
            pass
        except ApiError as error:
            await request.answer(error.status, error.body(), error.headers)

    # Else each connection with an unread body stays open for two seconds.
    with socket.socket() as listener, patch.object(request_module, "LINGER_S", 0.3):
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        bounds = HttpConfig(**{"max_body_bytes": 1000, **limits})
        async with run_server(handle, listener, bounds, grace_s=5, cut_off=lambda: None):
            yield listener.getsockname()[1]


async def echo(request: Request) -> None:
    await request.read()
    await request.answer(200, request.method.encode() + b" " + request.target.encode() + b" " + request.body)


async def received(stream: anyio.abc.SocketStream, end: bytes) -> bytes:
    """What the server says until it has said `end`."""
    out = b""
    while not out.endswith(end):
        out += await stream.receive()
    return out


async def spoken(port: int, *portions: bytes) -> bytes:
    """What the server says to `portions` until it closes."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for portion in portions:
            await stream.send(portion)
        return await until_closed(stream)


async def until_closed(stream: anyio.abc.SocketStream) -> bytes:
    """What the server says until the connection ends."""
    out = b""
    try:
        while True:
            out += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return out
