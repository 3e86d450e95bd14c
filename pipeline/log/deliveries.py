"""Messages of a pull consumer taken where they arrive, and acknowledged many in one write.

nats-py hands over each message through a parser of regular expressions, a message object with its headers decoded, a queue and a
task; together that is as much as everything the store does with an event (docs/store.md has the figures). Here a subscription's
messages are cut out of what the socket gave. Connecting, subscribing, reconnecting and every other message stay nats-py's.

This module knows of nats-py's inside: `_ps` (its parser), `_transport` and a subscription's `_id`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_ACKS = 500
"""Acknowledgements in one write."""


class Pulled:
    """A delivery; `headers` are decoded when they are asked for."""

    __slots__ = ("_client", "_head", "data", "reply", "subject")

    def __init__(self, client: Client, subject: bytes, reply: str, head: bytes, data: bytes) -> None:
        self._client, self.subject, self._head = client, subject.decode(), head
        self.reply, self.data = reply, data

    @property
    def headers(self) -> dict[str, str]:
        lines = (line.partition(b":") for line in self._head.split(b"\r\n")[1:] if line)
        return {name.decode(): value.strip().decode() for name, _, value in lines}

    def header(self, name: bytes) -> str:
        """One header, without decoding the others; empty where there is none."""
        head = self._head
        at = head.find(b"\r\n" + name + b":")
        if at < 0:
            return ""
        begin = at + len(name) + 3
        return head[begin : head.find(b"\r\n", begin)].strip().decode()

    @classmethod
    def of(cls, message: Msg) -> Pulled:
        """A delivery that came through nats-py."""
        lines = [f"{name}: {value}\r\n" for name, value in (message.headers or {}).items()]
        head = "".join(["NATS/1.0\r\n", *lines, "\r\n"]).encode()
        return cls(message._client, message.subject.encode(), message.reply, head, message.data)

    def message(self) -> Msg:
        """The same as nats-py's own."""
        return Msg(self._client, self.subject, self.reply, self.data, self.headers or None)


Take = Callable[[Pulled], None]


class Splitter(Parser):  # type: ignore[misc]
    """A connection's parser: deliveries to those who asked for them, everything else to nats-py's parser, command by command."""

    def __init__(self, client: Client) -> None:
        self._inner = client._ps
        self._takers: dict[bytes, Take] = {}
        self._buffer = bytearray()
        self._resets = 0
        self.nc = client
        super().reset()  # its own state only: the other parser may be in the middle of a command

    @classmethod
    def of(cls, client: Client) -> Splitter:
        """The connection's, put in front of the parser that it has."""
        if not isinstance(client._ps, cls):
            client._ps = cls(client)
        splitter: Splitter = client._ps
        return splitter

    def hand(self, subscription: int, take: Take) -> None:
        """From now on `take` gets what is delivered to a subscription and has a reply subject."""
        self._takers[b"%d" % subscription] = take

    def forget(self, subscription: int) -> None:
        self._takers.pop(b"%d" % subscription, None)

    def reset(self) -> None:
        """A connection broke: what had come of a command is gone with it."""
        super().reset()
        self._buffer.clear()
        self._resets += 1
        self._inner.reset()

    async def parse(self, data: bytes = b"") -> None:
        inner, buffer, resets = self._inner, self._buffer, self._resets
        if not buffer and (inner.buf or inner.state != AWAITING_CONTROL_LINE):
            await inner.parse(data)  # it had begun a command before this was put in front of it
            return
        buffer += data
        at, size = 0, len(buffer)
        while at < size:
            at = self._fast(at, size)
            end = self._end(at, size)
            if end < 0:
                break
            await inner.parse(bytes(buffer[at:end]))
            if self._resets != resets:
                return
            at = end
        del buffer[:at]

    def _fast(self, at: int, size: int) -> int:
        """Take whole deliveries from `at` on; where the first command begins that is none."""
        buffer, takers, client = self._buffer, self._takers, self.nc
        view = memoryview(buffer)
        try:
            while at < size and buffer.startswith(b"HMSG ", at):
                eol = buffer.find(b"\r\n", at)
                if eol < 0:
                    return at
                words = view[at + 5 : eol].tobytes().split()
                take = takers.get(words[1]) if len(words) == 5 else None
                if take is None:
                    return at
                begin = eol + 2
                middle, end = begin + int(words[3]), begin + int(words[4])
                if end + 2 > size:
                    return at
                take(
                    Pulled(
                        client,
                        words[0],
                        words[2].decode(),
                        view[begin:middle].tobytes(),
                        view[middle:end].tobytes(),
                    )
                )
                at = end + 2
            return at
        finally:
            view.release()

    def _end(self, at: int, size: int) -> int:
        """Where the command at `at` ends; -1 where it is not there as a whole."""
        buffer = self._buffer
        eol = buffer.find(b"\r\n", at)
        if eol < 0:
            return -1
        end = eol + 2
        if buffer.startswith((b"MSG ", b"HMSG "), at):
            end += int(bytes(buffer[at:eol]).split()[-1]) + 2
        return end if end <= size else -1


async def acknowledge(client: Client, replies: Sequence[str]) -> None:
    """Acknowledge deliveries by their reply subjects; a lost acknowledgement leads to redelivery."""
    for i in range(0, len(replies), _ACKS):
        some = replies[i : i + _ACKS]
        if client.is_connected:
            client._transport.write(b"".join([b"PUB %b 0\r\n\r\n" % reply.encode() for reply in some]))
            with contextlib.suppress(OSError):  # the connection broke: what was lost comes again
                await client._transport.drain()
        else:
            for reply in some:
                await client.publish(reply)


def subscription_id(subscription: Any) -> int:
    return int(subscription._id)
