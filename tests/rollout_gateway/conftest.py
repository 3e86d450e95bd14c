"""Fixtures: a gateway process for each test, and adapters to publish."""

import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pipeline.config import Config, FeedbackConfig, GatewayConfig, ModelConfig, NatsConfig, OutsideConfig, VllmConfig
from pipeline.config import save as save_config
from pipeline.log.broker import Broker
from tests.conftest import NatsServer, VllmServer, free_port
from tests.kits.adapters import adapter_files
from tests.kits.clients import closed_after_test
from tests.kits.events import checkpoint
from tests.kits.sampler import SamplerThread
from tests.kits.services import serving
from tests.kits.settings import with_values
from tests.rollout_gateway import forks
from tests.rollout_gateway.fake_vllm import FakeVllm
from trainer.checkpoints.checkpoint import adapter_archive

PROJECT = "test"


class GatewayProcess:
    """A gateway on a fixed port; `kill` and `start` again keep port and folder."""

    process: BaseProcess

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.path()
        save_config(config, self.folder / "config.toml")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.gateway.port}"

    @property
    def log(self) -> str:
        return (self.folder / "gateway.log").read_text()

    def start(self, crash_at: str = "") -> None:
        """`crash_at`: where the process dies, as `pipeline.crash.arm` takes it."""
        self.process, line = forks.start(self.folder / "config.toml", self.folder / "gateway.log", crash_at)
        if not line:
            self.wait()
            raise RuntimeError(self.log)
        assert json.loads(line).get("url", self.url) == self.url

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        self.process.join()

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Wait until it ends, for a minute at most. Returns its exit status."""
        self.process.join(60)
        assert self.process.exitcode is not None, self.log
        return self.process.exitcode

    def restart(self, crash_at: str = "", **settings: Any) -> None:
        """Kill it, and start it again with these settings of `gateway`. `crash_at`: as for `start`."""
        self.kill()
        self.config = with_values(self.config, {f"gateway.{name}": value for name, value in settings.items()})
        save_config(self.config, self.folder / "config.toml")
        self.start(crash_at)

    def stop(self) -> None:
        if self.process.exitcode is None:
            self.process.terminate()
            assert self.wait() == 0, self.log

    def client(self, **options: Any) -> openai.OpenAI:
        """A client that is closed when the test ends."""
        options = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 8, **options}
        return closed_after_test(openai.OpenAI(**options))

    def open(self, **body: Any) -> dict[str, Any]:
        reply = httpx.post(f"{self.url}/v1/trajectories", json={"model": "tictactoe", **body})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def complete(self, trajectory: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/trajectories/{trajectory}/complete", json=body, timeout=60)

    def agent(self, opened: dict[str, Any], **options: Any) -> openai.OpenAI:
        """An OpenAI client that belongs to a trajectory."""
        return self.client(base_url=opened["base_url"], api_key=opened["api_key"], **options)


StartGateway = Callable[..., GatewayProcess]


@contextlib.contextmanager
def gateways(
    tmp_path: Path, nats: NatsConfig, models: tuple[ModelConfig, ...], at: tuple[str, ...] = (), **defaults: Any
) -> Iterator[StartGateway]:
    """Starts gateways on the test's log, and stops them at the end. Keyword arguments are gateway settings. `urls` are
    the inference servers, by default those `at`. The first gateway comes with a sampler agent for them."""
    with contextlib.ExitStack() as stack:
        agents: list[SamplerThread] = []

        def start(
            *,
            folder: str = "run",
            urls: tuple[str, ...] = (),
            max_loras: int = 4,
            max_signals: int = 1000,
            outside: tuple[OutsideConfig, ...] = (),
            **settings: Any,
        ) -> GatewayProcess:
            config = Config(
                project=PROJECT,
                run_dir=str(tmp_path / folder),
                nats=nats,
                vllm=VllmConfig(urls=urls or at, max_loras=max_loras),
                models=models,
                outside=outside,
                feedback=FeedbackConfig(max_signals=max_signals),
                gateway=with_values(GatewayConfig(), {"port": free_port(), **defaults, **settings}),
            )
            gateway = GatewayProcess(config)
            stack.callback(gateway.stop)
            gateway.start()
            if config.vllm.urls and not agents:
                agents.append(SamplerThread(with_values(config, {"run_dir": str(tmp_path / "sampler")})))
                stack.callback(agents[0].stop)
                agents[0].start()
            return gateway

        yield start


@pytest.fixture
def start_gateway(tmp_path: Path, nats_config: NatsConfig, vllm_server: VllmServer) -> Iterator[StartGateway]:
    """Starts gateways in front of the session's vLLM."""
    models = (ModelConfig(name="tictactoe", base=str(vllm_server.base)),)
    with gateways(tmp_path, nats_config, models, (vllm_server.url,)) as start:
        yield start
    unload_all(vllm_server)


@pytest.fixture
def start_gateway_alone(tmp_path: Path, nats_config: NatsConfig) -> Iterator[StartGateway]:
    """Starts gateways without vLLM: `urls` are those of servers that a test makes itself."""
    with gateways(tmp_path, nats_config, (ModelConfig(name="tictactoe"),)) as start:
        yield start


@pytest.fixture
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    """A scriptable inference server in the test's event loop."""
    server = FakeVllm()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def start_front(tmp_path: Path, nats_config: NatsConfig) -> Iterator[StartGateway]:
    """Starts gateways without an inference server: a model call that is admitted gets `no_replica`."""
    models = (ModelConfig(name="tictactoe"), ModelConfig(name="chess"))
    with gateways(tmp_path, nats_config, models, **{"replicas.wait_s": 0.1}) as start:
        yield start


@pytest.fixture
def gateway(start_gateway: StartGateway) -> GatewayProcess:
    return start_gateway()


@contextmanager
def shared(folder: Path, url: str, **settings: Any) -> Iterator[GatewayProcess]:
    """A gateway with a log of its own, at `config.nats`, before the inference server at `url`."""
    models = (ModelConfig(name="tictactoe", base=str(VllmServer.base)),)
    with (
        serving(NatsServer(folder)) as nats,
        gateways(folder, NatsConfig(url=nats.url), models, (url,), **settings) as start,
    ):
        yield start()


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory, vllm_server: VllmServer) -> Iterator[GatewayProcess]:
    """One gateway for the tests of a module that do nothing but play in runs of their own."""
    with shared(tmp_path_factory.mktemp("shared"), vllm_server.url) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def long_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """vLLM with room for a coding agent's prompt, and with a chat template that shows the model its reasoning. Tests
    that use it are in the xdist group `LONG`. While developing, JOURNEYWORK_TEST_VLLM_LONG may hold the port of one."""
    folder, given = tmp_path_factory.mktemp("long"), os.environ.get("JOURNEYWORK_TEST_VLLM_LONG")
    template = (VllmServer.base / "chat_template.jinja").read_text()
    shown = "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '')"
    opening = "'<|' + message.role + '|>' + "
    assert opening in template
    (folder / "template.jinja").write_text(template.replace(opening, f"{opening}{shown} + "))
    # The model was made for 1,024 positions; beyond them its rotary embedding has to be computed first.
    long = ("--max-model-len", "32768", "--hf-overrides", '{"max_position_embeddings": 32768}')
    server = VllmServer(folder, int(given or 0), (*long, "--chat-template", str(folder / "template.jinja")))
    with contextlib.nullcontext(server) if given else serving(server):
        yield server


LONG = pytest.mark.xdist_group("vllm with long prompts")


def unload_all(server: VllmServer) -> None:
    """Leave the shared vLLM as it was found."""
    cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    for card in cards:
        if card["parent"]:
            httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": card["id"]}, timeout=60)


def published_files(seed: int) -> dict[str, bytes]:
    """The adapter that `publish_adapter` publishes, whose weights change what is sampled."""
    return adapter_files(seed, scale=0.5)


async def publish_adapter(
    broker: Broker,
    step: int,
    *,
    seed: int | None = None,
    groups: tuple[str, ...] = (),
    branch: str = "main",
    metrics: dict[str, float] | None = None,
) -> str:
    """Put a checkpoint on the log as a trainer does; its version."""
    files = published_files(step if seed is None else seed)
    data = adapter_archive(files)
    digest = hashlib.sha256(data).hexdigest()
    version = f"tictactoe@{step}"
    name = f"{PROJECT}/{version}/{digest[:16]}"
    await broker.put_object("ADAPTERS", name, data)
    adapter = {"adapter": name, "adapter_sha256": digest, "adapter_bytes": len(data)}
    # Without digests, a sampler agent takes a folder that another server loads from for one that was changed.
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    more = {"groups": groups, "branch": branch, "files": digests, "metrics": metrics or {}, **adapter}
    await broker.publish(checkpoint(step, "tictactoe", project=PROJECT, **more))
    return version
