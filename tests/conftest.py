"""Real servers for tests: NATS from its wheel on a free port with a temporary store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import NatsConfig


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class NatsServer:
    """A NATS server process; `stop` and `start` keep its port and store, so that a restart can be tested."""

    def __init__(self, folder: Path, max_payload: int = 1_048_576) -> None:
        self.folder, self.port = folder, -1
        self._config = folder / "nats.conf"
        self._max_payload = max_payload
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        ports = self.folder / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir(parents=True)
        self._config.write_text(
            f'host: 127.0.0.1\nport: {self.port}\nmax_payload: {self._max_payload}\nports_file_dir: "{ports}"\n'
            f'jetstream {{ store_dir: "{self.folder / "js"}" }}\n'
        )
        binary = Path(sys.executable).with_name("nats-server")
        log = (self.folder / "nats.log").open("ab")
        with log:
            self.process = subprocess.Popen([str(binary), "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for file in ports.glob("*.ports"):
                text = file.read_text()
                if text.strip():
                    self.port = int(json.loads(text)["nats"][0].rsplit(":", 1)[1])
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError((self.folder / "nats.log").read_text())

    def kill(self) -> None:
        """As `kill -9`."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def start_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NatsServer]]:
    """Starts NATS servers of a test's own."""
    servers: list[NatsServer] = []

    def start(**options: int) -> NatsServer:
        server = NatsServer(tmp_path_factory.mktemp("nats"), **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def nats_server(start_nats: Callable[..., NatsServer]) -> NatsServer:
    return start_nats()


@pytest.fixture
def nats_config(nats_server: NatsServer) -> NatsConfig:
    return NatsConfig(url=nats_server.url, publish_deadline_s=20)
