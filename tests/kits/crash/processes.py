"""The test's side of the fork server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from tests.kits.crash.fork_server import ACK_WAIT_S


class ForkServer:
    """Starts processes of services through `tests.kits.crash.fork_server`."""

    def __init__(self, config: Path, *services: str, ack_wait_s: float = ACK_WAIT_S) -> None:
        """`config`: the settings of processes that name no others. `services`: those that will be started, and modules
        that they import later; none: all services. `ack_wait_s`: the acknowledgement time of their consumers."""
        command = [sys.executable, "-m", "tests.kits.crash.fork_server", str(ack_wait_s), *services]
        self._config = config
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes: dict[int, ServiceProcess] = {0: ServiceProcess(self, 0, "")}

    async def listen(self) -> None:
        """Read what the fork server and its processes write, until it ends. Raises `RuntimeError` then."""
        assert self._server.stdout is not None
        while line := await anyio.to_thread.run_sync(self._server.stdout.readline, abandon_on_cancel=True):
            facts = json.loads(line)
            process = self._processes[facts["id"]]
            if "ready" in facts:
                process.ready.set()
            if "status" in facts:
                process.status = facts["status"]
                process.ended.set()
        raise RuntimeError("the fork server ended: see its output")

    async def imported(self) -> None:
        """Wait until every service is imported."""
        await self._processes[0].ready.wait()

    def start(self, service: str, where: str = "", config: Path | None = None) -> ServiceProcess:
        """Start a process that dies at the stop point `where`, `<point>:<passage>`; empty: at none."""
        process = ServiceProcess(self, len(self._processes), where)
        self._processes[process.number] = process
        self.order({"id": process.number, "service": service, "config": str(config or self._config), "crash": where})
        return process

    def order(self, order: dict[str, str | int]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        self._server.stdin.flush()

    def close(self) -> None:
        """Kill all running processes."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(120)
        self._server.stdout.close()


@asynccontextmanager
async def fork_server(config: Path, *services: str, ack_wait_s: float = ACK_WAIT_S) -> AsyncIterator[ForkServer]:
    """A fork server that has imported the services; at the end it and its processes are gone."""
    server = ForkServer(config, *services, ack_wait_s=ack_wait_s)
    async with anyio.create_task_group() as tg:
        try:
            tg.start_soon(server.listen)
            await server.imported()
            yield server
            tg.cancel_scope.cancel()
        finally:
            server.close()


@dataclass(eq=False)
class ServiceProcess:
    """One process of a service."""

    fork_server: ForkServer
    number: int
    where: str
    status: int | None = None
    ready: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        self.fork_server.order({"id": self.number, "signal": number})

    async def end(self, number: int) -> int:
        """Send a signal, unless the process has ended; return its exit status once it has."""
        self.send(number)
        await self.ended.wait()
        assert self.status is not None
        return self.status
