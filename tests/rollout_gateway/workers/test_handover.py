"""Connections are divided evenly among the workers, and each reaches one of them whole."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from rollout_gateway.workers import handover

pytestmark = pytest.mark.anyio


class Echo(asyncio.Protocol):
    """Answers with the name of the worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.worker.name + b" " + data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.receiver.connection_closed()


class Worker:
    """A worker in the test's process."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        ours, theirs = handover.pair()
        self.channel, self.receiver = (
            handover.WorkerChannel(ours, theirs.dup()),
            handover.ConnectionReceiver(theirs),
        )

    async def start(self) -> None:
        await self.receiver.start(lambda: Echo(self))

    def die(self) -> None:
        self.receiver.close()
        self.channel.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def worker(self) -> bytes:
        """Name of the worker that answers."""
        self._writer.write(b"hello")
        return (await self._reader.readuntil(b"hello")).removesuffix(b" hello")

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class Port:
    def __init__(self, listener: socket.socket) -> None:
        self._number = listener.getsockname()[1]
        self.distributor = handover.Distributor(listener)

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self._number))


@asynccontextmanager
async def port_of(*workers: Worker) -> AsyncIterator[Port]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        listener.setblocking(False)
        port = Port(listener)
        port.distributor.start()
        for worker in workers:
            await worker.start()
            port.distributor.add(worker.channel)
        try:
            yield port
        finally:
            port.distributor.close()
            for worker in workers:
                port.distributor.remove(worker.channel)
                worker.die()


async def test_each_worker_gets_as_many_kept_connections_as_the_others() -> None:
    workers = [Worker(b"a"), Worker(b"b"), Worker(b"c")]
    async with port_of(*workers) as port:
        clients = [await port.connect() for _ in range(30)]
        served = [await client.worker() for client in clients]
        assert {name: served.count(name) for name in (b"a", b"b", b"c")} == {b"a": 10, b"b": 10, b"c": 10}
        for client, name in zip(clients, served, strict=True):
            if name == b"b":
                await client.leave()
        with anyio.fail_after(30):
            while workers[1].channel.open:
                await asyncio.sleep(0.001)  # until the owner has heard of it
        more = [await port.connect() for _ in range(10)]
        assert [await client.worker() for client in more] == [b"b"] * 10
        for client in (*more, *(c for c, name in zip(clients, served, strict=True) if name != b"b")):
            await client.leave()


async def test_connections_wait_while_no_worker_is_there() -> None:
    worker = Worker(b"late")
    async with port_of() as port:
        client = await port.connect()
        asked = asyncio.ensure_future(client.worker())
        await worker.start()
        port.distributor.add(worker.channel)
        assert await asked == b"late"
        await client.leave()
        port.distributor.remove(worker.channel)
        worker.die()


async def test_what_a_dead_worker_has_not_received_goes_to_another() -> None:
    dead, alive = Worker(b"dead"), Worker(b"alive")
    async with port_of(dead, alive) as port:
        dead.receiver.close()
        clients = [await port.connect() for _ in range(4)]
        asked = [asyncio.ensure_future(client.worker()) for client in clients]
        with anyio.fail_after(30):
            while dead.channel.open < 2:
                await asyncio.sleep(0.001)  # until the owner has given it its share
        port.distributor.remove(dead.channel)
        assert await asyncio.gather(*asked) == [b"alive"] * 4
        assert (dead.channel.open, alive.channel.open) == (0, 4)
        for client in clients:
            await client.leave()


async def test_a_worker_that_responds_again_gets_connections_again() -> None:
    a, b = Worker(b"a"), Worker(b"b")
    async with port_of(a, b) as port:
        clients = [await port.connect()]
        assert await clients[0].worker() == b"a"
        port.distributor.remove(a.channel)
        clients += [await port.connect() for _ in range(3)]
        assert [await client.worker() for client in clients] == [b"a", b"b", b"b", b"b"]
        port.distributor.add(a.channel)
        clients += [await port.connect() for _ in range(2)]
        assert [await client.worker() for client in clients[4:]] == [b"a", b"a"]
        for client in clients:
            await client.leave()


async def test_a_full_channel_holds_connections_back_until_its_worker_takes_them() -> None:
    worker = Worker(b"slow")
    async with port_of() as port:
        port.distributor.add(worker.channel)  # it does not read yet
        clients = [await port.connect() for _ in range(600)]
        asked = [asyncio.ensure_future(client.worker()) for client in clients]
        await worker.start()
        with anyio.fail_after(60):
            assert set(await asyncio.gather(*asked)) == {b"slow"}
        for client in clients:
            await client.leave()
        port.distributor.remove(worker.channel)
        worker.die()
