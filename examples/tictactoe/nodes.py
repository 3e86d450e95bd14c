"""The demo on several nodes: `make demo NODES=3`.

Three NATS servers with three copies of every stream, two gateways behind one address, two judges, two stores of one
lake, and the trainer in an installation of its own, connected to the log through relays. Each installation is a
`journeywork up` with its own run directory, as on machines of their own:

    <run-dir>/first     vLLM with its sampler agent, a gateway, a judge, a store, and the demo's report
    <run-dir>/second    a gateway, a judge, a store
    <run-dir>/trainer   the trainer
    <run-dir>/lake      the lake, into which both stores write
    <run-dir>/nats      the NATS servers
    <run-dir>/keys      the key that the trainer signs checkpoints with

In the middle of training, `Faults` kills a NATS server, a gateway, a judge and a store, and cuts the trainer off
from the log for 30 seconds. The NATS servers ask for no user, and listen on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from examples.common.running import ExampleError, Installation
from pipeline.running.plan import LOOPBACK, free_port

LOOK_EVERY_S = 0.2
NODE_DOWN_S = 10.0
"""How long a killed NATS server stays away."""
NODE_STOP_S = 30.0
"""How long a NATS server may take to write everything and end."""
PARTITION_S = 30.0
SECRET = "JOURNEYWORK_KEY_SECRET"
"""Variable with the secret from which both gateways make the keys of trajectories."""


class Relay:
    """Passes connections on to the first of the ports `targets` that takes them, beginning with another one each time.
    Its methods run in the event loop of `Nodes`."""

    def __init__(self, port: int, targets: Sequence[int]) -> None:
        self.port, self._targets = port, list(targets)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._turn = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def cut(self) -> None:
        """Pass nothing on, and close nothing, as a network does that loses every packet."""
        self._open.clear()

    async def mend(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._connections.discard(task)
            await _closed(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        self._turn += 1
        for i in range(len(self._targets)):
            port = self._targets[(self._turn + i) % len(self._targets)]
            try:
                theirs, to_them = await asyncio.open_connection(LOOPBACK, port)
            except OSError:
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pass_on(reader, to_them))
                    tasks.create_task(self._pass_on(theirs, writer))
            finally:
                await _closed(to_them)
            return

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class NatsNode:
    """One NATS server of the cluster. After `kill`, `start` takes it up again with its store."""

    def __init__(self, folder: Path, port: int, route: int, routes: Sequence[int]) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        urls = ", ".join(f'"nats://{LOOPBACK}:{r}"' for r in routes)
        (folder / "nats.conf").write_text(
            f"server_name: {folder.name}\nhost: {LOOPBACK}\nport: {port}\n"
            f"jetstream {{ store_dir: {json.dumps(str(folder / 'jetstream'))}\n sync_interval: 10s }}\n"
            # Clients learn of no other server than those they were told of, so a relay can't be gone round.
            f"cluster {{ name: demo, host: {LOOPBACK}, port: {route}, no_advertise: true, routes: [{urls}] }}\n",
            "utf-8",
        )

    def start(self) -> None:
        binary = Path(sys.executable).with_name("nats-server")
        with (self.folder / "nats.log").open("ab") as sink:
            self.process = subprocess.Popen(
                [binary, "-c", self.folder / "nats.conf"], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """As `kill -9`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Let the server write everything and end. Kills it and raises `ExampleError` if it takes longer than
        `NODE_STOP_S`."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(NODE_STOP_S)
        except subprocess.TimeoutExpired:
            raise ExampleError(
                f"the NATS server {self.folder.name} did not stop in {NODE_STOP_S:g} s and was killed; "
                f"see {self.folder}/nats.log"
            ) from None
        finally:
            self.kill()  # no effect on a server that has ended


class Nodes:
    """The installations of the demo. It has what the demo uses of an `Installation`."""

    def __init__(self, run_dir: Path, config: Path, overrides: Mapping[str, Any]) -> None:
        self.run_dir, self._config = run_dir / "first", config
        self._folder = run_dir
        run_dir.mkdir(parents=True)
        self._exit = contextlib.ExitStack()
        # The relays have an event loop of their own, which runs until everything has stopped.
        self._portal = self._exit.enter_context(start_blocking_portal())
        ports = [free_port() for _ in range(6)]
        self.nats = [
            NatsNode(run_dir / "nats" / f"n{i}", ports[i], ports[3 + i], ports[3:]) for i in range(3)
        ]
        for node in self.nats:
            node.start()
        os.environ.setdefault(SECRET, secrets.token_hex(32))
        self._vllm, gateways = free_port(), (free_port(), free_port())
        self.relays = [Relay(free_port(), [node.port]) for node in self.nats]
        self.front = Relay(free_port(), gateways)
        seed = run_dir / "keys" / "checkpoints.nk"
        self._overrides = {
            **overrides,
            "nats.url": [f"nats://{LOOPBACK}:{node.port}" for node in self.nats],
            "nats.replicas": 3,
            "gateway.public_url": f"http://{LOOPBACK}:{self.front.port}",
            "gateway.key_secret_env": SECRET,
            "signing.seed": str(seed),
            "store.dir": str(run_dir / "lake"),
        }
        self._gateways = gateways
        self.installations: dict[str, Installation] = {}

    def _up(self, name: str, services: str, settings: Mapping[str, Any]) -> Installation:
        values = {**self._overrides, **settings}
        made = Installation(self._folder / name, self._config, values, "--services", services)
        self.installations[name] = made
        return made

    async def ready(self) -> str:
        """Start the installations, and return the URL of the gateways once everything works."""
        for relay in (*self.relays, self.front):
            self._portal.call(relay.start)
        ports = {"gateway.port": self._gateways[0], "vllm.port": self._vllm}
        first = self._up("first", "gateway,sampler,judge,store", ports)
        await first.ready()
        vllm = {
            "vllm.urls": [f"http://{LOOPBACK}:{self._vllm}"],
            "vllm.api_key_file": str(first.run_dir / "keys" / "vllm.key"),
        }
        relayed = [f"nats://{LOOPBACK}:{relay.port}" for relay in self.relays]
        others = [
            self._up("second", "gateway,judge,store", {"gateway.port": self._gateways[1], **vllm}),
            self._up("trainer", "trainer", {"nats.url": relayed, **vllm}),
        ]
        for installation in others:
            await _started(installation)
        return f"http://{LOOPBACK}:{self.front.port}"

    async def connect_trainer(self, connected: bool) -> None:
        """Let the trainer's connections to the log pass, or nothing of them."""
        for relay in self.relays:
            await asyncio.to_thread(self._portal.call, relay.mend if connected else relay.cut)

    def check(self) -> None:
        """Raises `ExampleError` if an installation has ended."""
        for installation in self.installations.values():
            installation.check()

    def restarts(self) -> int:
        return sum(installation.restarts() for installation in self.installations.values())

    def stop(self) -> None:
        """Stop everything: the trainer first, then the installations whose stores write what the log holds, then the
        NATS servers, the relays, and the relays' event loop.

        What does not stop in time is killed, and everything else is stopped all the same. Raises the `ExampleError` of
        the last one that was killed; the earlier ones are its context."""
        with self._exit as stops:  # called in reverse order, each one even if another one raises
            for relay in (*self.relays, self.front):
                stops.callback(self._portal.call, relay.close)
            for node in self.nats:
                stops.callback(node.stop)
            for name in ("first", "second", "trainer"):
                if name in self.installations:
                    stops.callback(self.installations[name].stop)


async def _started(installation: Installation) -> None:
    state = installation.run_dir / "state.json"
    while not (state.exists() and json.loads(state.read_text())["ready"]):
        installation.check()
        await asyncio.sleep(LOOK_EVERY_S)


@dataclass
class Faults:
    """What is broken in the middle of training, each at its share of the steps."""

    nodes: Nodes
    done: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, share: Callable[[], float]) -> None:
        """Break one thing after the other, when `share()` (of the steps, 0 to 1) has come so far."""
        began = time.monotonic()
        plan: tuple[tuple[float, str, Callable[[], Awaitable[None]]], ...] = (
            (0.15, "nats", self._nats),
            (0.3, "gateway", partial(self._kill, "gateway")),
            (0.45, "judge", partial(self._kill, "judge")),
            (0.6, "store", partial(self._kill, "store")),
            (0.7, "partition", self._partition),
        )
        for at, name, fault in plan:
            while share() < at:  # noqa: ASYNC110 - time is a part of the share
                await asyncio.sleep(LOOK_EVERY_S)
            seconds = round(time.monotonic() - began, 1)
            await fault()
            self.done.append(
                {"fault": name, "at_s": seconds, "took_s": round(time.monotonic() - began - seconds, 1)}
            )

    async def _nats(self) -> None:
        node = self.nodes.nats[1]
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(NODE_DOWN_S)
        node.start()

    async def _partition(self) -> None:
        await self.nodes.connect_trainer(False)
        await asyncio.sleep(PARTITION_S)
        await self.nodes.connect_trainer(True)

    async def _kill(self, service: str) -> None:
        """Kill a service of the first installation, as `kill -9` does."""
        state = json.loads((self.nodes.installations["first"].run_dir / "state.json").read_text())
        pid = state["services"][service]["pid"]
        if not pid:
            raise ExampleError(f"{service} does not run, so it can't be killed")
        os.kill(pid, signal.SIGKILL)
