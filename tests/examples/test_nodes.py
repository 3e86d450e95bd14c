"""The parts of the demo on three nodes: relays, and NATS servers that are killed and come back."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from examples.common.running import ExampleError
from examples.tictactoe.nodes import NatsNode, Nodes, Relay
from pipeline.config import NatsConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.running.plan import LOOPBACK, free_port

pytestmark = pytest.mark.anyio


def opened(trajectory: str) -> TrajectoryOpened:
    return TrajectoryOpened(project="p", trajectory=trajectory, model="m", group="g")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()
    await writer.wait_closed()


async def test_a_relay_passes_connections_on_to_a_server_that_is_up() -> None:
    up, down = free_port(), free_port()
    relay = Relay(free_port(), [down, up])
    await relay.start()
    async with await asyncio.start_server(echo, LOOPBACK, up):
        for word in (b"one", b"two", b"three"):  # each connection begins with another target
            reader, writer = await asyncio.open_connection(LOOPBACK, relay.port)
            writer.write(word)
            assert await reader.read(100) == word
            writer.close()
            assert await reader.read(100) == b""
            await writer.wait_closed()
    await relay.close()


async def test_a_relay_that_is_cut_passes_nothing_on_until_it_is_mended() -> None:
    relay = Relay(free_port(), [port := free_port()])
    await relay.start()
    async with await asyncio.start_server(echo, LOOPBACK, port):
        reader, writer = await asyncio.open_connection(LOOPBACK, relay.port)
        writer.write(b"before")
        assert await reader.read(100) == b"before"
        await relay.cut()
        writer.write(b"while it is cut")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.read(100)
        await relay.mend()
        assert await reader.read(100) == b"while it is cut"
        writer.close()
        assert await reader.read(100) == b""
        await writer.wait_closed()
    await relay.close()


@pytest.mark.timeout(180)
async def test_a_killed_nats_server_comes_back_with_its_store_and_the_cluster_goes_on_without_it(
    tmp_path: Path,
) -> None:
    ports = [free_port() for _ in range(6)]
    nodes = [NatsNode(tmp_path / f"n{i}", ports[i], ports[3 + i], ports[3:]) for i in range(3)]
    for node in nodes:
        node.start()
    try:
        # One address: the cluster names no other server to its clients, as they would go round a relay.
        config = NatsConfig(
            url=(f"nats://{LOOPBACK}:{ports[0]}",), replicas=3, connect_timeout_s=60, ack_timeout_s=2.0,
            publish_deadline_s=100,
        )  # fmt: skip
        async with Broker.connect(config) as broker:
            await broker.publish(opened("t-1"))
            nodes[1].kill()
            await broker.publish(opened("t-2"))
            nodes[1].start()
            await broker.publish(opened("t-3"))
            found = [r.event.trajectory for r in await broker.read(TrajectoryOpened)]
            assert found == ["t-1", "t-2", "t-3"]
            assert {server.port for server in broker.client.servers} == {ports[0]}
    finally:
        for node in nodes:
            node.stop()


class Unstoppable:
    """A process that ends only when it is killed, or an installation that reports that it had to be."""

    killed = stopped = False

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None:
            raise subprocess.TimeoutExpired("nats-server", timeout)
        assert self.killed

    def kill(self) -> None:
        self.killed = True

    def stop(self) -> None:
        self.stopped = True
        raise ExampleError("journeywork up did not stop")


def test_what_does_not_end_in_time_does_not_keep_the_rest_running(tmp_path: Path) -> None:
    """The fault that was: one server that did not end left the later servers and the relays running."""
    nodes = Nodes(tmp_path / "run", tmp_path / "config.toml", {})
    stuck, installations = Unstoppable(), {name: Unstoppable() for name in ("first", "second", "trainer")}
    nodes.nats[1].kill()
    nodes.nats[1].process = stuck  # type: ignore[assignment]
    nodes.installations.update(installations)  # type: ignore[arg-type]
    try:
        with pytest.raises(ExampleError):
            nodes.stop()
        assert stuck.killed
        assert all(installation.stopped for installation in installations.values())
        assert [node.process for node in nodes.nats] == [None, None, None]
    finally:
        nodes._exit.close()  # else the thread of the relays would keep the tests from ending
        for node in nodes.nats:
            node.kill()
