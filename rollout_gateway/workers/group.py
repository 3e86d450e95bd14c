"""A worker's membership in its gateway's group of workers, and its calls to all of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import msgspec

from rollout_gateway.workers.handover import ConnectionReceiver
from rollout_gateway.workers.rpc import RpcClosedError, RpcConnection

WAIT_S = 2.0
"""How long a call waits for the replies of the other workers. A worker that does not reply in time is left out."""
OWNER = "owner"
"""Label of the owner of the port among the replies."""
WORKERS = "workers"
"""Method that the owner answers itself: the state of each worker."""

WorkerState = Literal["ready", "silent", "starting"]

Respond = Callable[[bytes], Awaitable[bytes]]
_replies = msgspec.msgpack.Decoder(dict[str, bytes])
_states = msgspec.msgpack.Decoder(dict[str, WorkerState])


class WorkerGroup:
    """This process and the other workers of its gateway. Without workers, this process only."""

    def __init__(self, number: int = 0) -> None:
        """`number`: the number of this worker, from 1; 0 if the gateway has no workers."""
        self.number = number
        self.connections: ConnectionReceiver | None = None
        """Receives this worker's client connections from the owner; `None` if the gateway has no workers."""
        self._rpc: RpcConnection | None = None
        self._responders: dict[str, Respond] = {}

    @classmethod
    def join(cls, number: int, connections: int, rpc: int) -> WorkerGroup:
        """Return the group as seen by worker `number`. `connections` and `rpc` are the file descriptors that the owner
        passed to this process: for client connections, and for calls to the owner."""
        group = cls(number)
        for descriptor in (connections, rpc):
            os.set_inheritable(descriptor, False)
        group.connections = ConnectionReceiver(socket.socket(fileno=connections))
        group._rpc = RpcConnection(socket.socket(fileno=rpc), group._handle)
        return group

    @property
    def name(self) -> str:
        """Label of this worker; empty if the gateway has no workers."""
        return str(self.number) if self.number else ""

    def on(self, method: str, respond: Respond) -> None:
        """Answer calls of `method` with `respond`, in this process."""
        self._responders[method] = respond

    async def run(self) -> None:
        """Answer the other workers' calls. Returns when the owner has ended, or at once if there are no workers."""
        if self._rpc is not None:
            await self._rpc.run()

    async def call_all(self, method: str, content: bytes = b"") -> dict[str, bytes]:
        """Call `method` in all workers, this one included. Return their replies by label.

        A worker that is not running or does not reply within `WAIT_S` is left out."""
        replies = {}
        if self._rpc is not None:
            try:
                with anyio.move_on_after(WAIT_S + 1):
                    replies = _replies.decode(await self._rpc.call(method, content))
            except RpcClosedError:
                pass  # the owner has ended, so this worker is about to end too
        replies[self.name] = await self._responders[method](content)
        return replies

    async def states(self) -> dict[str, WorkerState]:
        """Return the state of every worker by label, as the owner knows it. Empty if the gateway has no workers or the
        owner does not reply within `WAIT_S`."""
        if self._rpc is not None:
            with anyio.move_on_after(WAIT_S), contextlib.suppress(RpcClosedError):
                return _states.decode(await self._rpc.call(WORKERS))
        return {}

    async def _handle(self, method: str, content: bytes) -> bytes:
        return await self._responders[method](content)
