"""Remote calls between the owner of the port and a worker, in both directions, over a socket pair.

A message is its length (4 bytes, little-endian) and a MessagePack array of the call's number, its method (empty in a
reply), and the content.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import msgspec

from pipeline.telemetry.logs import get_logger

log = get_logger("rollout_gateway.workers.rpc")

Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Takes a method and the content of a call; returns the content of the reply."""

_decoder = msgspec.msgpack.Decoder(tuple[int, str, bytes])
_encode = msgspec.msgpack.Encoder().encode


class RpcClosedError(Exception):
    """The process at the other end has ended."""


class RpcConnection:
    """One end of a connection. Each end may call the other."""

    def __init__(self, connection: socket.socket, handler: Handler) -> None:
        """`handler` answers the calls of the other end."""
        self._connection, self._handler = connection, handler
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        """Calls that wait for their reply, by number."""
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None
        self._handling: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self) -> None:
        """Read calls and replies until the other process ends."""
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        self._writer = writer
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                number, method, content = _decoder.decode(await reader.readexactly(size))
                if method:
                    task = asyncio.ensure_future(self._reply(number, method, content))
                    self._handling.add(task)
                    task.add_done_callback(self._handling.discard)
                elif (pending := self._pending.pop(number, None)) is not None and not pending.done():
                    pending.set_result(content)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other process has ended
        finally:
            self._closed = True
            for pending in self._pending.values():
                if not pending.done():
                    pending.set_exception(RpcClosedError())
            for task in self._handling:
                task.cancel()
            writer.close()

    async def call(self, method: str, content: bytes = b"") -> bytes:
        """Call the other process and return the content of its reply. Raises `RpcClosedError` if it has ended.

        There is no reply if its handler fails, so the caller sets a deadline."""
        if self._closed or self._writer is None:
            raise RpcClosedError
        self._next += 1
        number = self._next
        pending: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        self._send(number, method, content)
        try:
            return await pending
        finally:
            self._pending.pop(number, None)

    async def _reply(self, number: int, method: str, content: bytes) -> None:
        try:
            reply = await self._handler(method, content)
        except Exception as error:  # noqa: BLE001 - a supervision edge: a fault in one reply does not end the process
            log.error("a call between gateway processes failed", method=method, exc=error)
            return  # the caller waits until its own deadline
        self._send(number, "", reply)

    def _send(self, number: int, method: str, content: bytes) -> None:
        if self._writer is not None and not self._closed:
            data = _encode((number, method, content))
            self._writer.write(len(data).to_bytes(4, "little") + data)
