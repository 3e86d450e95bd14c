"""Questions and answers between the owner and a worker, both ways, through a socket pair.

A message is its length (4 bytes) and a MessagePack array: the question's number, its kind (empty for an answer), the
content.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import msgspec

from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.workers.link")

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a question of a kind."""

_decoder = msgspec.msgpack.Decoder(tuple[int, str, bytes])
_encode = msgspec.msgpack.Encoder().encode


class LinkLostError(Exception):
    """The other process has ended."""


class Link:
    """One end of a link."""

    def __init__(self, connection: socket.socket, answer: Answer) -> None:
        self._connection, self._answer = connection, answer
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._lost = False

    async def run(self) -> None:
        """Read questions and answers until the other process ends."""
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        self._writer = writer
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                number, kind, content = _decoder.decode(await reader.readexactly(size))
                if kind:
                    task = asyncio.ensure_future(self._reply(number, kind, content))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif (waiting := self._asked.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result(content)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process has ended
        finally:
            self._lost = True
            for waiting in self._asked.values():
                if not waiting.done():
                    waiting.set_exception(LinkLostError())
            for task in self._answering:
                task.cancel()
            writer.close()

    async def ask(self, kind: str, content: bytes = b"") -> bytes:
        """Return the answer of the other process. Raises `LinkLostError` if it has ended."""
        if self._lost or self._writer is None:
            raise LinkLostError
        self._next += 1
        number = self._next
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = waiting
        self._send(number, kind, content)
        try:
            return await waiting
        finally:
            self._asked.pop(number, None)

    async def _reply(self, number: int, kind: str, content: bytes) -> None:
        try:
            answer = await self._answer(kind, content)
        except Exception as error:  # noqa: BLE001 - a supervision edge: a fault in one answer does not end the process
            log.error("a question could not be answered", kind=kind, exc=error)
            return  # whoever asked waits until its own deadline
        self._send(number, "", answer)

    def _send(self, number: int, kind: str, content: bytes) -> None:
        if self._writer is not None and not self._lost:
            data = _encode((number, kind, content))
            self._writer.write(len(data).to_bytes(4, "little") + data)
