"""Real servers for tests: NATS from its wheel on a free port with a temporary store, and one vLLM for the session."""

import contextlib
import gc
import itertools
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.running.plan import CPU_FLAGS, ONE_PROCESS, one_process_environment
from tests.kits import certificates, clients
from tests.kits.quick_service import quick_consumers
from tests.kits.services import serving

# A module that many processes of tests import is compiled once, also where the shell says otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

with contextlib.suppress(ImportError):  # the GPU lock has no hypothesis, and its tests need none
    import hypothesis

    # No test asserts a time.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("untimed")


# Tests wait for a server of theirs as long as for anything else: httpx's own 5 seconds are too few on a busy machine.
_waits = httpx._config.DEFAULT_TIMEOUT_CONFIG
_waits.connect = _waits.read = _waits.write = _waits.pool = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command configures the root logger for its whole process; the next test must not inherit its level or
    handlers."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    """A client that is left to the garbage collector fails the test that runs when it is collected."""
    before = len(clients.OPEN)
    yield
    for client in clients.OPEN[before:]:
        client.close()
    del clients.OPEN[before:]


class NatsServer:
    """A NATS server process; `stop` and `start` keep its port and store, so that a restart can be tested."""

    def __init__(self, folder: Path, max_payload: int = 1_048_576, extra: str = "") -> None:
        """`extra` is more of the server's configuration, such as its users."""
        self.folder, self.port, self._extra = folder, -1, extra
        self._config = folder / "nats.conf"
        self._max_payload = max_payload
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "nats.log").read_text()

    def start(self) -> None:
        first = self.port < 0
        if first:
            self.port = free_port()  # one that the server chose itself could go to another while it is killed
        ports = self.folder / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir(parents=True)
        self._config.write_text(
            f'host: 127.0.0.1\nport: {self.port}\nmax_payload: {self._max_payload}\nports_file_dir: "{ports}"\n'
            f'jetstream {{ store_dir: "{self.folder / "js"}" }}\n{self._extra}'
        )
        binary = Path(sys.executable).with_name("nats-server")
        log = (self.folder / "nats.log").open("ab")
        with log:
            self.process = subprocess.Popen([str(binary), "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for file in ports.glob("*.ports"):
                text = file.read_text()
                if text.strip():
                    return None
            if self.process.poll() is not None:
                if first and "address already in use" in self.log:
                    self.port = -1
                    return self.start()
                break
            time.sleep(0.02)
        raise RuntimeError(self.log)

    def kill(self) -> None:
        """As `kill -9`."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def start_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., NatsServer]]:
    """Starts NATS servers of a test's own."""
    servers: list[NatsServer] = []

    def start(**options: Any) -> NatsServer:
        server = NatsServer(tmp_path_factory.mktemp("nats"), **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        if server.process is not None:  # else it did not start
            server.kill()  # in order it takes a tenth of a second, and nothing reads its store any more


@pytest.fixture
def nats_server(start_nats: Callable[..., NatsServer]) -> NatsServer:
    return start_nats()


@pytest.fixture
def nats_config(nats_server: NatsServer) -> NatsConfig:
    return NatsConfig(url=nats_server.url, publish_deadline_s=20)


@pytest.fixture
async def broker(nats_config: NatsConfig) -> AsyncIterator[Broker]:
    """A connection to the log of `nats_config`. A test that changes `streams` first makes its own."""
    async with Broker.connect(nats_config) as broker:
        yield broker


@pytest.fixture
def quick_redelivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the log deliver again after two seconds, instead of ten, what a service held that is gone. The service runs
    in this process."""
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers())


class VllmServer:
    """A real vLLM (CPU build) that serves examples/tictactoe/model as `tictactoe@0` with room for 4 adapters of rank
    8."""

    model = "tictactoe"
    base = Path(__file__).parent.parent / "examples" / "tictactoe" / "model"
    module = "vllm.entrypoints.openai.api_server"
    flags: tuple[str, ...] = (
        *("--host", "127.0.0.1"),
        *CPU_FLAGS,
        *ONE_PROCESS,
        *("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--max-model-len", "256"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )

    def __init__(self, folder: Path, port: int = 0, args: Sequence[str] = ()) -> None:
        self.folder, self.args = folder, tuple(args)
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        named = ("--port", str(self.port), "--model", str(self.base), "--served-model-name", f"{self.model}@0")
        return [sys.executable, "-m", self.module, *named, *self.flags, *self.args]

    def start(self, timeout_s: float = 300) -> None:
        """Returns once it answers; `stop` or `kill`, then `start` again keeps the port."""
        env = dict(
            os.environ,
            **one_process_environment(),
            VLLM_CPU_KVCACHE_SPACE="1",
            HF_HUB_OFFLINE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
            VLLM_NO_USAGE_STATS="1",
            VLLM_SERVER_DEV_MODE="1",
        )
        command = self.command()
        with (self.folder / "vllm.log").open("ab") as log:
            # A session of its own, so that the engine processes end with the server, also when it is killed.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        text = (self.folder / "vllm.log").read_text()
        self.kill()
        raise RuntimeError(f"vLLM did not start:\n{text[-4000:]}")

    def kill(self) -> None:
        """As `kill -9` of the server and its engine."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            # How long vLLM takes to stop is not ours to test; beside other work it can exceed any limit.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.kill()


class InferenceDouble(VllmServer):
    """`tests.kits.inference_double` in place of vLLM: it starts in seconds and answers at once."""

    module, flags = "tests.kits.inference_double", ()


DOUBLE = os.environ.get("JOURNEYWORK_TEST_INFERENCE") == "double"
"""Whether tests marked `inference` get the double: `make check` sets this."""


_PORTS = range(15_000, 31_000)
"""Below those that Linux gives to outgoing connections (from 32768): one of those could be taken by any connection of
the machine while a server that tests kill is down."""


def _ports() -> Iterator[int]:
    """Each worker's ports in turn, from a random one on, so that no other test of this run is given a port again while
    its server is starting or is down."""
    worker, workers = (os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = _PORTS[int(worker.removeprefix("gw")) :: int(workers)]
    start = random.SystemRandom().randrange(len(own))  # hypothesis seeds `random`, in each worker alike
    yield from itertools.cycle([*own[start:], *own[:start]])


_next_ports = _ports()


def free_port() -> int:
    """Return a port that nobody listens at and that this run's tests did not get recently."""
    for port in _next_ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError  # the ports come round for ever


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One inference server for the whole session, started when a test first asks for it: `.url`, `.model`. Real vLLM,
    or its double where JOURNEYWORK_TEST_INFERENCE=double is set.

    It outlives each test, and so do adapters loaded into it: unload yours. While developing, JOURNEYWORK_TEST_VLLM may
    hold the port of one started by hand with the same arguments, which saves its start-up."""
    given = os.environ.get("JOURNEYWORK_TEST_VLLM")
    kind = InferenceDouble if DOUBLE else VllmServer
    server = kind(tmp_path_factory.mktemp("vllm"), int(given or 0))
    with contextlib.nullcontext(server) if given else serving(server):
        yield server


@pytest.fixture(scope="session")
def inference_double(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """The double, also where other tests have real vLLM."""
    if DOUBLE:
        yield request.getfixturevalue("vllm_server")
        return
    with serving(InferenceDouble(tmp_path_factory.mktemp("double"))) as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last test of a module, collect the connections that it left open. Programs of others do not close their
    clients, and a connection that is collected during a later test fails that one.

    What is alive then, such as all of PyTorch, stays so: later collections pass it over. Each would take a second with
    it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "unclosed (<socket|transport)", ResourceWarning)
            gc.collect()
            gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests their worker and their time, and the workers an order."""
    for item in items:
        if item.get_closest_marker("inference") and not DOUBLE:
            item.add_marker(pytest.mark.vllm)
        if group := _worker_group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        # The first test that needs vLLM also waits for its start-up, so all of them may take longer.
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if hasattr(config, "workerinput"):
        # Long tests come first, so that no worker begins one when the others have finished.
        items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("vllm")))


class _GroupNames:
    """Puts the group of a test into its node id, where pytest-xdist's scheduler looks for it. pytest-xdist 3.8 sets
    `_nodeid` to that end, which pytest 9.2 no longer reads: each worker would start a vLLM."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            group = "_".join(sorted({mark.args[0] for mark in item.iter_markers("xdist_group")}))
            if group and not item.nodeid.endswith(f"@{group}"):
                item._id = type(item.id).parse(f"{item.nodeid}@{group}")


def _worker_group(item: pytest.Item) -> str:
    """Return the name of the tests that one worker of pytest-xdist runs together with this one; empty: any worker runs
    it by itself. Tests share a worker if they share vLLM, or what a fixture of their module starts."""
    if item.get_closest_marker("xdist_group"):
        return ""  # its module says more
    info = getattr(item, "_fixtureinfo", None)  # none: no function
    fixtures = info.name2fixturedefs if info is not None else {}
    doubled = DOUBLE and (item.get_closest_marker("inference") or "inference_double" in fixtures)
    if item.get_closest_marker("vllm") or doubled:
        return "vllm"
    # The last definition of a fixture overrides the others.
    shared = any(definitions[-1].scope == "module" for definitions in fixtures.values())
    return str(item.path.relative_to(item.config.rootpath)) if shared else ""


def pytest_configure(config: pytest.Config) -> None:
    certificates.share_contexts()
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests of one worker, with pytest-xdist")
    if getattr(config.option, "loadgroup", False):  # a worker under `--dist loadgroup`
        config.pluginmanager.register(_GroupNames())


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at their end whether all of theirs was freed
