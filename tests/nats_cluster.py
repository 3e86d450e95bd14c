"""A NATS cluster of three on the loopback, for tests: what one server alone never does, such as answering late or
losing a leader."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import httpx
import nats.errors
from nats.aio.client import Client

from tests.conftest import NatsServer, free_port

NODES = 3


class Node(NatsServer):
    """One server; `kill` and `start` again keep its ports and its store."""

    def __init__(
        self, folder: Path, name: str, ports: Sequence[int], routes: Sequence[int], max_payload: int, extra: str
    ) -> None:
        port, route, self.monitor = ports
        urls = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        more = (
            f'server_name: {name}\nhttp: "127.0.0.1:{self.monitor}"\n'
            f"cluster {{ name: test, host: 127.0.0.1, port: {route}, routes: [{urls}] }}\n{extra}"
        )
        super().__init__(folder / name, max_payload, more)
        self.name, self.port = name, port


class NatsCluster:
    """Three nodes."""

    def __init__(self, folder: Path, max_payload: int = 1_048_576, extra: str = "") -> None:
        """`extra` is more of each server's configuration, such as its users."""
        ports = [free_port() for _ in range(3 * NODES)]
        routes = ports[NODES : 2 * NODES]
        self.nodes = [
            Node(folder, f"n{i}", (ports[i], routes[i], ports[2 * NODES + i]), routes, max_payload, extra)
            for i in range(NODES)
        ]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(node.url for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()

    def stop(self) -> None:
        for node in self.nodes:
            if node.process is not None:  # else a node before it did not start
                node.kill()
            shutil.rmtree(node.folder / "js", ignore_errors=True)

    def node(self, name: str) -> Node:
        return next(n for n in self.nodes if n.name == name)

    async def healthy(self, nodes: Sequence[Node] | None = None) -> None:
        """Until the nodes say that all their streams and consumers have a leader and are up to date."""
        async with httpx.AsyncClient(trust_env=False) as client:
            for node in nodes or self.nodes:
                while not await _healthy(client, node):
                    await anyio.sleep(0.1)  # a server says so only when asked


async def _healthy(client: httpx.AsyncClient, node: Node) -> bool:
    try:
        return (await client.get(f"http://127.0.0.1:{node.monitor}/healthz")).status_code == 200
    except httpx.HTTPError:
        return False


async def leader_of(client: Client, stream: str, consumer: str = "") -> str:
    """Name of the node that leads a stream or one of its consumers."""
    js = client.jetstream()
    while True:
        try:
            info = await (js.consumer_info(stream, consumer) if consumer else js.stream_info(stream))
            if info.cluster is not None and info.cluster.leader:
                return str(info.cluster.leader)
        except (TimeoutError, nats.errors.Error):
            pass
        await anyio.sleep(0.1)  # paces the question to a cluster that elects


async def copied(client: Client, stream: str) -> None:
    """Until every replica of a stream has all that its leader has."""
    js = client.jetstream()
    while True:
        info = await js.stream_info(stream)
        replicas = (info.cluster.replicas if info.cluster is not None else None) or []
        if len(replicas) == NODES - 1 and all(r.current and not r.lag for r in replicas):
            return
        await anyio.sleep(0.05)  # only the leader can be asked
