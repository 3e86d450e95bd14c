"""A worker's place among the others, and its questions to all of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import msgspec

from rollout_gateway.workers.handover import ConnectionReceiver
from rollout_gateway.workers.link import Link, LinkLostError

WAIT_S = 2.0
"""How long the answers of the other workers are waited for. One that does not answer is left out."""
OWNER = "owner"
"""Stands for the owner among those that answer."""
WORKERS = "workers"
"""The question that the owner answers alone: the state of each worker."""

WorkerState = Literal["ready", "silent", "starting"]

Respond = Callable[[bytes], Awaitable[bytes]]
_answers = msgspec.msgpack.Decoder(dict[str, bytes])
_states = msgspec.msgpack.Decoder(dict[str, WorkerState])


class Siblings:
    """This process and the other workers of its gateway. Without workers, only this process."""

    def __init__(self, number: int = 0) -> None:
        """`number`: of this worker, from 1; 0 if the gateway has no workers."""
        self.number = number
        self.connections: ConnectionReceiver | None = None
        """Where this worker's connections come from."""
        self._link: Link | None = None
        self._respond: dict[str, Respond] = {}

    @classmethod
    def of_worker(cls, number: int, connections: int, link: int) -> Siblings:
        """The place of worker `number`, which was started with these file descriptors."""
        found = cls(number)
        for handle in (connections, link):
            os.set_inheritable(handle, False)
        found.connections = ConnectionReceiver(socket.socket(fileno=connections))
        found._link = Link(socket.socket(fileno=link), found._answer)
        return found

    @property
    def name(self) -> str:
        """Label of this worker; empty if the gateway has no workers."""
        return str(self.number) if self.number else ""

    def on(self, kind: str, respond: Respond) -> None:
        """Answer the other workers' questions of this kind with `respond`."""
        self._respond[kind] = respond

    async def run(self) -> None:
        """Answer the other workers. Returns when the owner has ended, or at once if there are no workers."""
        if self._link is not None:
            await self._link.run()

    async def ask(self, kind: str, content: bytes = b"") -> dict[str, bytes]:
        """The answers of all workers by their label, this process's among them. A worker that is not there, or does
        not answer within `WAIT_S`, is left out."""
        answers = {}
        if self._link is not None:
            try:
                with anyio.move_on_after(WAIT_S + 1):
                    answers = _answers.decode(await self._link.ask(kind, content))
            except LinkLostError:
                pass  # this worker is about to end too
        answers[self.name] = await self._respond[kind](content)
        return answers

    async def states(self) -> dict[str, WorkerState]:
        """The state of every worker by its label, without asking the others. Empty if the gateway has no workers, or
        the owner of its port does not answer."""
        if self._link is not None:
            with anyio.move_on_after(WAIT_S), contextlib.suppress(LinkLostError):
                return _states.decode(await self._link.ask(WORKERS))
        return {}

    async def _answer(self, kind: str, content: bytes) -> bytes:
        return await self._respond[kind](content)
