"""Publishing to JetStream at a proxy's rate: a message is one write, its acknowledgement one future.

nats-py's own request makes a task switch, a timer, a random id and a message object of each acknowledgement, which is
more than everything else that the gateway does for a call (docs/decisions/0006). Here all acknowledgements
come to one inbox and are read where they arrive; one timer looks after all of them. Connecting, subscribing and
reconnecting stay nats-py's.

This module knows of nats-py's inside: `_ps` (its parser), `_transport` with its stream reader, and `_pending`. Whatever
the fast way does not recognise goes on to nats-py's parser and comes back through an ordinary subscription.

Errors: nats-py's, as its own `publish` raises them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_SWEEP_S = 0.25
_FLUSH_S = 2


class _Error(msgspec.Struct):
    code: int | None = None
    err_code: int | None = None
    description: str | None = None


class Ack(msgspec.Struct):
    """The broker's acknowledgement; `duplicate` if the log already held the event."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_decode = msgspec.json.Decoder(Ack).decode


class _AckParser(Parser):  # type: ignore[misc]  # nats-py's parser is untyped
    """nats-py's parser, with a short way for acknowledgements that are whole."""

    def __init__(self, client: Client, publisher: Publisher) -> None:
        super().__init__(client)
        self._publisher = publisher

    async def parse(self, data: bytes = b"") -> None:
        self._publisher.listen(self)
        if self.between():
            data = self._publisher.take(data)
        await super().parse(data)

    def between(self) -> bool:
        """All that was given to this parser are whole commands."""
        return not self.buf and self.state == AWAITING_CONTROL_LINE


class Publisher:
    """Publishes on one connection: made before it is there, `start`ed once it is."""

    def __init__(self, client: Client, inbox_prefix: str = "_INBOX") -> None:
        """`inbox_prefix` is what the connection will have: the server may let it listen nowhere else."""
        self._client = client
        self._inbox = f"{inbox_prefix}.{client._nuid.next().decode()}.".encode()
        self._mark = b"MSG " + self._inbox
        self._waiting: dict[bytes, tuple[asyncio.Future[bytes], float]] = {}
        """By the last token of the inbox: the acknowledgement, and when to give up on it."""
        self._written: list[bytes] = []
        self._reader: asyncio.StreamReader | None = None
        """The connection's, once it is listened to."""
        self._count = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        client._ps = _AckParser(client, self)

    async def start(self) -> None:
        await self._client.subscribe(self._inbox.decode() + "*", cb=self._on_message)

    async def listens(self) -> None:
        """Return once the server has the subscription. Raises nats-py's errors where it does not answer.

        nats-py sends a subscription from a task of its own. A message that is written before it has an acknowledgement
        that goes to nobody."""
        await self._client.flush(_FLUSH_S)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(nats.errors.ConnectionClosedError())

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Ack:
        """Send a message and wait for JetStream's word on it."""
        self._count += 1
        token = b"%x" % self._count
        command = _command(subject, self._inbox + token, payload, headers)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[token] = future, self._loop.time() + timeout_s
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        try:
            self._write(command)
            ack = _decode(await future)
        finally:
            self._waiting.pop(token, None)
        if ack.error is not None:
            raise nats.js.errors.APIError.from_error(msgspec.to_builtins(ack.error))
        return ack

    def _write(self, command: bytes) -> None:
        client = self._client
        if client.is_connected:
            # One that is alone goes out at once; what one turn of the loop publishes beside others, in one system call.
            if not self._written and len(self._waiting) > 1:
                self._loop.call_soon(self._send)
            self._written.append(command)
            if len(self._waiting) == 1:
                self._send()
            return
        if client.is_closed:
            raise nats.errors.ConnectionClosedError
        if client._pending_data_size + len(command) > client._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        client._pending.append(command)  # sent once the connection is back
        client._pending_data_size += len(command)

    def _send(self) -> None:
        written, self._written = self._written, []
        # Where the connection broke a moment ago, the callers' retries send it again.
        if written and self._client.is_connected:
            with contextlib.suppress(RuntimeError):
                self._client._transport.write(written[0] if len(written) == 1 else b"".join(written))

    def listen(self, parser: _AckParser) -> None:
        """From now on, take acknowledgements where the connection's bytes arrive, before any task of nats-py's wakes."""
        reader = getattr(self._client._transport, "_io_reader", None)
        if reader is None or reader is self._reader or self._client._ps is not parser:
            return
        self._reader = reader
        feed, buffered = reader.feed_data, reader._buffer

        def take_first(data: bytes) -> None:
            if not buffered and parser.between() and self._client._ps is parser:
                data = self.take(data)
            if data:
                feed(data)

        reader.feed_data = take_first

    def take(self, data: bytes) -> bytes:
        """Resolve the acknowledgements that `data` begins with; the rest is nats-py's."""
        mark, at = self._mark, 0
        while data.startswith(mark, at):
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line = data[at + len(mark) : end].split()
            if len(line) != 3:  # token, subscription, size; any other has a reply subject
                break
            after = end + 2 + int(line[2])
            if len(data) < after + 2:
                break
            self._resolve(line[0], data[end + 2 : after])
            at = after + 2
        return data[at:] if at else data

    def _resolve(self, token: bytes, answer: bytes) -> None:
        found = self._waiting.get(token)
        if found is not None and not found[0].done():
            found[0].set_result(answer)

    async def _on_message(self, message: Msg) -> None:
        token = message.subject.encode()[len(self._inbox) :]
        if message.headers and message.headers.get(api.Header.STATUS) == "503":
            found = self._waiting.get(token)
            if found is not None and not found[0].done():
                found[0].set_exception(nats.js.errors.NoStreamResponseError())
        else:
            self._resolve(token, message.data)

    def _sweep(self) -> None:
        now, self._sweeper = self._loop.time(), None
        for future, deadline in list(self._waiting.values()):
            if deadline < now and not future.done():
                future.set_exception(nats.errors.TimeoutError())
        if self._waiting:
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)


def _command(subject: str, reply: bytes, payload: bytes, headers: Mapping[str, str]) -> bytes:
    # Added, not formatted: some names are members of an enumeration, which format as something else.
    text = "".join([name + ": " + value + "\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        text = "".join([name + ": " + " ".join(value.split()) + "\r\n" for name, value in headers.items()])
    head = b"NATS/1.0\r\n%b\r\n" % text.encode()
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject.encode(), reply, len(head), len(head) + len(payload), head, payload,
    )  # fmt: skip
