"""One connection to an inference server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

import httptools

Sink = Callable[[bytes], None]
Cutter = Callable[[bytes], int]
"""Takes bytes that begin with a chunk in chunked coding. Returns how many of them it consumed: whole chunks only."""


class UpstreamError(Exception):
    """The server could not be reached, or it broke off."""

    def __init__(self, message: str, *, answered: bool, sent: bool = True) -> None:
        super().__init__(message)
        self.answered = answered
        """Part of a reply had come."""
        self.sent = sent
        """The request had been sent."""


class UpstreamTimeoutError(UpstreamError):
    """The reply was not complete in time."""


class UpstreamConnection(asyncio.Protocol):
    """Sends one request at a time and parses its reply. `on_lost` is called when it breaks."""

    def __init__(self, on_lost: Callable[[UpstreamConnection], None]) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self.transport = cast(asyncio.Transport, None)  # until `connection_made`
        self.closed = False
        self.error: Exception | None = None
        self.deadline = math.inf
        """Loop time by which the reply must be complete. Infinite while no reply is expected."""
        self.reset()

    def reset(self) -> None:
        """Prepare for the next request."""
        self.status = 0
        self.sink: Sink | None = None
        """Takes the body as it arrives."""
        self.cutter: Cutter | None = None
        """Is asked before `sink` where a chunk begins."""
        self.keep_alive = False
        self.answered = False
        """Part of the reply has come."""
        self.head_done = False
        self.done = False
        """The reply is complete."""
        self._body: list[bytes] = []
        self._at_chunk = False
        """All that came of a chunked body are whole chunks, and it has not ended."""
        self._waiter: asyncio.Future[None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        if not self.answered:
            if self.deadline == math.inf:
                self.abort("the server sent data without a request")
                return
            self.answered = True
        elif self._at_chunk and self.cutter is not None:
            try:
                taken = self.cutter(data)
            except Exception as error:  # noqa: BLE001 - raised to the reader, in `wait_done`
                self._fail(error)
                return
            if taken == len(data):
                return
            data = data[taken:]
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the server's reply is not valid HTTP: {error}")
            return
        # The start of a next chunk's size has no line end yet. The parser reports a chunk once that line is complete.
        self._at_chunk = self._at_chunk and data.endswith(b"\r\n")
        if self.sink is not None:
            if self._body:
                try:
                    self.sink(self.take())
                except Exception as error:  # noqa: BLE001 - raised to the reader, in `wait_done`
                    self._fail(error)
            if not self.done:
                return
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.done and self.error is None:
            self.error = UpstreamError(f"the connection broke: {exc or 'closed'}", answered=self.answered)
        self._on_lost(self)
        self._wake()

    # -- httptools callbacks

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.head_done = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_chunk_header(self) -> None:
        self._at_chunk = False

    def on_chunk_complete(self) -> None:
        self._at_chunk = True

    def on_message_complete(self) -> None:
        if self.status < 200:  # an interim reply, such as 100 Continue
            self.head_done = False
            return
        self.done, self._at_chunk = True, False
        self.keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this

    # -- one exchange

    def send(self, data: bytes, deadline: float) -> None:
        """Send a request. Its reply must be complete by `deadline`, in the loop's time."""
        self.deadline = deadline
        self.transport.write(data)

    async def wait_head(self) -> None:
        """Wait until the reply's head has come. Raises the error that prevents it."""
        while not self.head_done:
            await self._wait()

    async def wait_done(self) -> None:
        """Wait until the reply is complete. Raises the error that prevents it, also one of `sink` or `cutter`."""
        while not self.done:
            await self._wait()
        if self.sink is not None and self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """Return what has arrived of the body since the last call."""
        body = self._body
        if not body:
            return b""
        data = body[0] if len(body) == 1 else b"".join(body)
        body.clear()
        return data

    def expire(self) -> None:
        """End an exchange whose deadline has passed."""
        if not self.done:
            self._fail(UpstreamTimeoutError("the reply was not complete in time", answered=self.answered))

    def abort(self, why: str) -> None:
        self._fail(
            UpstreamError(why, answered=self.answered) if self.error is None and not self.done else None
        )

    def _fail(self, error: Exception | None) -> None:
        self.error = error or self.error
        self.close()
        self._wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.transport.abort()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
