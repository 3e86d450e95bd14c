"""nats-py's client with a short way for the two things that happen once per event: publishing, and delivery in bulk.

nats-py makes of each incoming message two passes of regular expressions, a message object, a queue entry and a task
switch, and of each request a timer and a random id besides. That is more than everything else the gateway does for a
call or the store for an event; docs/decisions/log.md has the figures. Here acknowledgements of publishes and messages
of pull consumers are cut out of the bytes where the socket delivers them. Connecting, subscribing, reconnecting and
every other message stay nats-py's.

It closes sockets that nats-py leaves open, too. If a server dies between accepting a connection and its first word,
nats-py makes the next attempt on the same transport object and forgets the socket that it had. If an attempt is
cancelled at the moment at which it succeeds, `asyncio.wait_for` of Python 3.11 loses the connection.

This is the one module that uses private names of nats-py, which is therefore pinned to one minor version;
`tests/pipeline/log/test_fast_client.py` holds the pin.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.js import api
from nats.protocol.parser import Parser

_DEADLINES_EVERY_S = 0.25
"""Seconds between two checks whether an acknowledgement is overdue."""
_FLUSH_S = 2
"""Longest wait for the server's word that it has all that was sent, in seconds."""
_ACKS_PER_WRITE = 500
"""Acknowledgements in one write: about 40 KB."""


class _Error(msgspec.Struct):
    """Why the server refused a publish; what it says beyond this is left out."""

    code: int | None = None
    err_code: int | None = None
    description: str | None = None


class Ack(msgspec.Struct):
    """The server's acknowledgement of a publish; `duplicate` if the log already held the event."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_decode_ack = msgspec.json.Decoder(Ack).decode


def parse_headers(block: bytes) -> dict[str, str]:
    """Parse a header block: a line with the version, a line for each header, an empty line."""
    lines = (line.partition(":") for line in block.decode("utf-8", "replace").split("\r\n")[1:] if line)
    return {name: value.strip() for name, _, value in lines}


class Pulled:
    """A message of a pull consumer. `headers` are decoded on access."""

    __slots__ = ("_head", "data", "reply", "size", "subject")

    def __init__(self, subject: str, reply: str, head: bytes, data: bytes) -> None:
        """`head` is the header block as the server sent it, empty if there is none."""
        self.subject, self.reply, self._head, self.data = subject, reply, head, data
        self.size = len(data)  # that of the event, if a claim check takes its place

    @classmethod
    def from_message(cls, message: Msg) -> Pulled:
        """Return a message that came through nats-py as one of this class."""
        lines = [f"{name}: {value}\r\n" for name, value in (message.headers or {}).items()]
        return cls(message.subject, message.reply, "".join(["NATS/1.0\r\n", *lines, "\r\n"]).encode(), message.data)

    @property
    def headers(self) -> dict[str, str]:
        """The headers by name, decoded anew at each access."""
        return parse_headers(self._head)

    def header(self, name: bytes) -> str:
        """Return one header without decoding the others; empty if no header has that name."""
        head = self._head
        at = head.find(b"\r\n" + name + b":")
        if at < 0:
            return ""
        begin = at + len(name) + 3
        return head[begin : head.find(b"\r\n", begin)].strip().decode()


class _Parser(Parser):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's parser behind one that cuts out whole acknowledgements and pulled messages.

    Incoming bytes wait in `_pending` until a command is whole. Acknowledgements of publishes and messages of pull
    consumers end here (`extract`); every other command goes to nats-py, whole, so that its own parser never holds a
    part of one."""

    def __init__(self, client: FastClient) -> None:
        self._pending = bytearray()
        self._resets = 0
        """How often the connection broke: `parse` may find after a wait that its bytes are of an earlier one."""
        self.handlers: dict[bytes, Callable[[Pulled], None]] = {}
        """Subscription id to what takes its messages."""
        super().__init__(client)

    def reset(self) -> None:
        """The connection broke: the incomplete command is lost with it."""
        super().reset()
        self._pending.clear()
        self._resets += 1

    def is_between_commands(self) -> bool:
        """Return whether all bytes that came so far were whole commands."""
        return not self._pending

    async def parse(self, data: bytes = b"") -> None:
        """Take bytes that came: nats-py's reading task calls it with each portion."""
        self.nc.watch_socket()
        pending, resets, at = self._pending, self._resets, 0
        pending += data
        while at < len(pending):
            at = self.extract(pending, at)
            end = _end_of_command(pending, at)
            if end < 0:
                break
            await super().parse(bytes(pending[at:end]))
            if self._resets != resets:
                return
            at = end
        del pending[:at]

    def extract(self, data: bytes | bytearray, at: int) -> int:
        """Deal with acknowledgements and pulled messages from `at` on. Return where the first other or incomplete
        command begins."""
        size = len(data)
        with memoryview(data) as view:
            while at < size:
                if data.startswith(self.nc.ack_prefix, at):
                    end = self._take_ack(data, view, at)
                elif self.handlers and data.startswith((b"HMSG ", b"MSG "), at):
                    end = self._take_pulled(data, view, at)
                else:
                    break
                if end < 0:
                    break
                at = end
        return at

    def _take_ack(self, data: bytes | bytearray, view: memoryview, at: int) -> int:
        """Resolve the acknowledgement at `at`, a view of `data`: `MSG <inbox><token> <subscription> <size>`, a line
        break, the answer, a line break. Return where it ends; -1 if it is another message or not whole."""
        eol = data.find(b"\r\n", at)
        words = view[at + len(self.nc.ack_prefix) : eol].tobytes().split() if eol > 0 else []
        if len(words) != 3:  # any other message to the inbox has a reply subject
            return -1
        begin, end = eol + 2, eol + 2 + int(words[2])
        if end + 2 > len(data):
            return -1
        self.nc.resolve_ack(words[0], view[begin:end].tobytes())
        return end + 2

    def _take_pulled(self, data: bytes | bytearray, view: memoryview, at: int) -> int:
        """Hand the message at `at` to its subscription's handler: `MSG <subject> <subscription> <reply> <size>` or
        `HMSG <subject> <subscription> <reply> <size of the headers> <size>`, a line break, headers and data, a line
        break. Return where it ends; -1 if it is for nobody here or not whole."""
        eol = data.find(b"\r\n", at)
        verb, *words = view[at:eol].tobytes().split() if eol > 0 else [b""]
        # A message without a reply subject, such as the status of a request, has a word less.
        handler = self.handlers.get(words[1]) if len(words) == len(verb) + 1 else None
        if handler is None:
            return -1
        begin, end = eol + 2, eol + 2 + int(words[-1])
        if end + 2 > len(data):
            return -1
        middle = begin + (int(words[3]) if verb == b"HMSG" else 0)
        head, payload = view[begin:middle].tobytes(), view[middle:end].tobytes()
        handler(Pulled(words[0].decode(), words[2].decode(), head, payload))
        return end + 2


def _end_of_command(data: bytearray, at: int) -> int:
    """Return where the command at `at` ends; -1 if it is not whole."""
    eol = data.find(b"\r\n", at)
    if eol < 0:
        return -1
    end = eol + 2
    if data.startswith((b"MSG ", b"HMSG "), at):
        end += int(bytes(data[at:eol]).split()[-1]) + 2
    return end if end <= len(data) else -1


class _Transport(TcpTransport):  # type: ignore[misc]
    """Connects without `asyncio.wait_for`, which can lose a connection in Python 3.11."""

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: float) -> None:
        """Overrides nats-py's method: open the connection, within `connect_timeout` seconds."""
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(uri.hostname, uri.port, limit=buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    # On a connection that broke a moment ago uvloop's transports raise a `RuntimeError`, and asyncio's take the bytes.
    # nats-py expects neither: its writing task ended, and requests raised that error until its reading task noticed.

    def write(self, payload: bytes) -> None:
        """Overrides nats-py's method: write, and ignore a connection that broke."""
        with contextlib.suppress(RuntimeError):  # whoever sent it repeats it, or the reconnection does
            super().write(payload)

    def writelines(self, payload: Sequence[bytes]) -> None:
        """Overrides nats-py's method: write several commands. Raises an error that it expects if the connection
        broke."""
        try:
            super().writelines(payload)
        except RuntimeError as error:  # nats-py keeps the bytes for the next connection, and makes that
            raise ConnectionResetError("the connection to the NATS server broke") from error


class FastClient(Client):  # type: ignore[misc]
    """nats-py's client with `publish_acked`, `pulled_messages` and `acknowledge`."""

    _transport: Any

    def __init__(self) -> None:
        super().__init__()
        self._ps: _Parser = _Parser(self)
        self._inbox = b""
        self.ack_prefix = b"MSG without an inbox"
        """How the command of an acknowledgement begins; matches nothing before `start_publishing`."""
        self._waiting: dict[bytes, tuple[asyncio.Future[bytes], float]] = {}
        """Last token of the reply subject to the acknowledgement and the time at which to give up on it."""
        self._unsent: list[bytes] = []
        """Commands that `_send` writes at the end of this turn of the event loop."""
        self._count = 0
        """Publishes so far, from which tokens are made."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.StreamReader | None = None
        """The connection's reader, once its bytes are watched."""

    # -- connections ---------------------------------------------------------------------------------------------

    async def _connect_to_server(self, server: Any) -> None:
        """Overrides nats-py's method: each attempt gets a new transport, so that no socket is forgotten (see the
        module). Like that one it sets `last_attempt`, from which nats-py takes its pause between attempts."""
        self.close_socket()
        server.last_attempt = time.monotonic()
        self._transport = _Transport()
        await self._transport.connect(server.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    def close_socket(self) -> None:
        """Close the socket of an attempt that failed, or of a connection that has ended."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def watch_socket(self) -> None:
        """From now on, cut acknowledgements and pulled messages out of the connection's bytes as the socket delivers
        them, before any task of nats-py wakes. Does nothing if this connection is watched already."""
        reader = getattr(self._transport, "_io_reader", None)
        if reader is None or reader is self._reader:
            return
        self._reader = reader
        feed, buffered, parser = reader.feed_data, reader._buffer, self._ps

        def extract_and_feed(data: bytes) -> None:
            """Take the bytes of the socket: cut out what begins them, if all before were whole commands, and feed the
            rest to nats-py's reader."""
            if not buffered and parser.is_between_commands() and (at := parser.extract(data, 0)):
                data = data[at:]
            if data:
                feed(data)

        reader.feed_data = extract_and_feed

    async def _process_pong(self) -> None:
        """Also take the answer to a ping that was given up: nats-py's own method ends the task that reads then."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    # -- publishing ----------------------------------------------------------------------------------------------

    async def start_publishing(self) -> None:
        """Subscribe to the acknowledgements of `publish_acked`. `flush_subscriptions` must follow."""
        self._inbox = f"{self.new_inbox()}.".encode()
        self.ack_prefix = b"MSG " + self._inbox
        await self.subscribe(self._inbox.decode() + "*", cb=self._on_ack)

    async def flush_subscriptions(self) -> None:
        """Return once the server has the subscriptions. Raises nats-py's errors if it does not answer.

        nats-py sends a subscription from a task of its own: the acknowledgement of a message that is written before
        it would be lost."""
        await self.flush(_FLUSH_S)

    def stop_publishing(self) -> None:
        """Fail the publishes that still wait, with nats-py's `ConnectionClosedError`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(nats.errors.ConnectionClosedError())

    async def publish_acked(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Ack:
        """Send a message and return JetStream's acknowledgement. Raises nats-py's errors, as its own `js.publish`
        does."""
        self._count += 1
        token = b"%x" % self._count
        command = _publish_command(subject, self._inbox + token, payload, headers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting[token] = future, loop.time() + timeout_s
        if self._timer is None:
            self._timer = loop.call_later(_DEADLINES_EVERY_S, self._check_deadlines, loop)
        try:
            self._write(command, loop)
            ack = _decode_ack(await future)
        finally:
            self._waiting.pop(token, None)
        if ack.error is not None:
            raise nats.js.errors.APIError.from_error(msgspec.to_builtins(ack.error))
        return ack

    def _write(self, command: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Write a command to the connection, or keep it until there is one again. Raises nats-py's errors if the client
        is closed or its buffer full."""
        if self.is_connected:
            # A single message goes out at once. Those that one turn of the event loop adds to others go in one system
            # call.
            if not self._unsent and len(self._waiting) > 1:
                loop.call_soon(self._send)
            self._unsent.append(command)
            if len(self._waiting) == 1:
                self._send()
            return
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self._pending_data_size + len(command) > self._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        self._pending.append(command)  # sent once the connection is back
        self._pending_data_size += len(command)

    def _send(self) -> None:
        """Write what `_write` has collected in one turn of the event loop."""
        commands, self._unsent = self._unsent, []
        # If the connection broke a moment ago, the callers' retries send it again.
        if commands and self.is_connected:
            self._transport.write(commands[0] if len(commands) == 1 else b"".join(commands))

    def resolve_ack(self, token: bytes, answer: bytes) -> None:
        """End the wait for an acknowledgement."""
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting[0].done():
            waiting[0].set_result(answer)

    async def _on_ack(self, message: Msg) -> None:
        """Take an acknowledgement that came through nats-py, because the parser did not cut it out of the bytes (it has
        headers), or the server's word that no stream takes the message: status 503, no responders."""
        token = message.subject.encode()[len(self._inbox) :]
        if message.headers and message.headers.get(api.Header.STATUS) == "503":
            waiting = self._waiting.get(token)
            if waiting is not None and not waiting[0].done():
                waiting[0].set_exception(nats.js.errors.NoStreamResponseError())
        else:
            self.resolve_ack(token, message.data)

    def _check_deadlines(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up on acknowledgements that did not come in time. One timer for all costs less than one for each."""
        now, self._timer = loop.time(), None
        for future, deadline in list(self._waiting.values()):
            if deadline < now and not future.done():
                future.set_exception(nats.errors.TimeoutError())
        if self._waiting:
            self._timer = loop.call_later(_DEADLINES_EVERY_S, self._check_deadlines, loop)

    # -- pulled messages -----------------------------------------------------------------------------------------

    @contextmanager
    def pulled_messages(self, subscription: Subscription, handler: Callable[[Pulled], None]) -> Iterator[None]:
        """Within the block, call `handler` with each message of a subscription that has a reply subject. Every other
        one goes to the subscription's own callback."""
        sid = b"%d" % subscription._id
        self._ps.handlers[sid] = handler
        try:
            yield
        finally:
            del self._ps.handlers[sid]

    async def acknowledge(self, replies: Sequence[str]) -> None:
        """Acknowledge deliveries by their reply subjects, many in one write. A lost acknowledgement leads to
        redelivery."""
        for i in range(0, len(replies), _ACKS_PER_WRITE):
            batch = replies[i : i + _ACKS_PER_WRITE]
            if self.is_connected:
                self._transport.write(b"".join([b"PUB %b 0\r\n\r\n" % reply.encode() for reply in batch]))
                with contextlib.suppress(OSError):  # the connection broke: the server delivers them again
                    await self._transport.drain()
            else:
                for reply in batch:
                    await self.publish(reply)


def _publish_command(subject: str, reply: bytes, payload: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the command HPUB of NATS' protocol. A line break in a header's value becomes a space: it would begin
    another header."""
    # Added, not formatted: some names are members of an enumeration, which format as something else.
    text = "".join([name + ": " + value + "\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        text = "".join([name + ": " + " ".join(value.split()) + "\r\n" for name, value in headers.items()])
    head = b"NATS/1.0\r\n%b\r\n" % text.encode()
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (
        subject.encode(),
        reply,
        len(head),
        len(head) + len(payload),
        head,
        payload,
    )
