"""The turns of inference server and trainer on one GPU. No GPU here: what counts is the order of the turns."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from pipeline.config import Config, ConfigError, VllmConfig, load
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.kits.scoring_server import ScoringServer
from tests.trainer import kit
from trainer.gpu_turns import GpuTurns
from trainer.service import train

SLEEP = "/sleep?level=1&mode=wait"


class Server(ScoringServer):
    """Records what it is asked, with the key."""

    status = 200

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        self.asked.append((path, headers.get("authorization", "")))
        return self.status, {}

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server().run() as running:
        assert isinstance(running, Server)
        yield running


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the run directory of the default settings is relative


def with_server(config: Config, url: str, key: Path | None = None) -> Config:
    vllm = VllmConfig(urls=(url.removesuffix("/v1"),), sleep=True, max_loras=200, api_key_file=str(key or ""))
    return msgspec.structs.replace(config, vllm=vllm)


async def test_a_trainer_loads_and_steps_while_the_server_sleeps(
    settings: kit.Settings, broker: Broker, tmp_path: Path, server: Server
) -> None:
    (tmp_path / "vllm.key").write_text("sk-secret\n")
    config = settings(groups_per_step=1, max_steps=2)
    for number in range(2):
        await kit.publish_group(broker, f"g{number}", [0.0, 1.0], seed=number)
    with anyio.fail_after(100):
        await train(with_server(config, server.url, tmp_path / "vllm.key"), lambda **_: None)
    # A server that a dead trainer left asleep is woken first.
    assert server.paths == ["/wake_up", *[SLEEP, "/wake_up"] * 3]
    assert {key for _, key in server.asked} == {"Bearer sk-secret"}
    assert len(await kit.checkpoints(broker)) == 2


async def test_a_turn_that_fails_or_is_cancelled_wakes_the_server(server: Server) -> None:
    async with aclosing(GpuTurns(with_server(Config(), server.url))) as turns:
        with pytest.raises(ZeroDivisionError):
            async with turns.turn():
                1 / 0  # noqa: B018
        with anyio.CancelScope() as scope:
            async with turns.turn():
                scope.cancel()
                await anyio.sleep_forever()
    assert server.paths == ["/wake_up", SLEEP, "/wake_up"] * 2


async def test_two_trainers_of_a_run_directory_do_not_have_their_turns_at_once(server: Server, tmp_path: Path) -> None:
    config = msgspec.structs.replace(with_server(Config(), server.url), run_dir=str(tmp_path))
    async with (
        aclosing(GpuTurns(config)) as first,
        aclosing(GpuTurns(config)) as second,
        anyio.create_task_group() as tg,
    ):

        async def take() -> None:
            async with second.turn():
                server.asked.append(("second", ""))

        async with first.turn():
            tg.start_soon(take)
            await anyio.sleep(1)  # time in which the second would take the GPU
            assert server.paths == ["/wake_up", SLEEP]
    assert server.paths == ["/wake_up", SLEEP, "/wake_up", "/wake_up", SLEEP, "second", "/wake_up"]


async def test_a_server_that_can_not_sleep_says_how_it_could(server: Server) -> None:
    async with aclosing(GpuTurns(with_server(Config(), server.url))) as turns:
        for server.status, error, told in (
            (404, ConfigError, "can't sleep: start it with --enable-sleep-mode"),
            (500, httpx.HTTPStatusError, "500"),
        ):
            with pytest.raises(error, match=told):
                async with turns.turn():
                    pytest.fail("the trainer took a GPU that is in use")


async def test_a_server_that_is_down_needs_no_turn() -> None:
    reached = False
    async with aclosing(GpuTurns(with_server(Config(), "http://127.0.0.1:9"))) as turns, turns.turn():
        reached = True
    assert reached


def test_several_trainers_can_not_take_turns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.sleep: only a trainer of one process"):
        load(None, [f"run_dir={tmp_path}", "vllm.sleep=true", "trainer.processes=2"])


@pytest.mark.vllm
async def test_calls_wait_while_vllm_sleeps(vllm_server: VllmServer) -> None:
    ask = {"model": f"{vllm_server.model}@0", "prompt": "a1", "max_tokens": 4}
    answers: list[httpx.Response] = []
    async with (
        aclosing(GpuTurns(with_server(Config(), vllm_server.url))) as turns,
        httpx.AsyncClient(base_url=vllm_server.url, timeout=60) as client,
        anyio.create_task_group() as tg,
    ):

        async def call() -> None:
            answers.append(await client.post("/v1/completions", json=ask))

        async with turns.turn():
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            tg.start_soon(call)
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=ask, timeout=2)
            assert answers == []
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    (answer,) = answers
    assert len(answer.json()["choices"]) == 1
