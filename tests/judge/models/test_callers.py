"""The judge model called from processes of their own, against the scoring server over HTTP."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import psutil
import pytest

from judge.models.callers import open_complete
from judge.models.llm import ModelError, Reply
from pipeline.config import ConfigError, JudgeConfig
from tests.kits.scoring_server import Answer, ScoringServer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

HELLO = [{"role": "user", "content": "hello"}]


def settings(server: ScoringServer, **fields: Any) -> JudgeConfig:
    return JudgeConfig(model="openai/scorer", api_base=server.url, **{"retries": 0, "workers": 2, **fields})


def callers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "judge.models.callers" in p.cmdline()]


async def test_calls_are_shared_by_processes_and_each_gets_its_own_answer() -> None:
    def answer(request: dict[str, Any]) -> Answer:
        said = str(request["messages"][0]["content"])
        return 500 if said == "fail" else said

    async with (
        ScoringServer(answer, delay_s=0.05).run() as server,
        open_complete(settings(server, concurrency=3)) as complete,
    ):
        found: dict[str, Reply] = {}
        failures: list[str] = []

        async def one(text: str) -> None:
            try:
                found[text] = await complete([{"role": "user", "content": text}], None)
            except ModelError as error:
                failures.append(str(error))

        async with anyio.create_task_group() as tg:
            for text in [*map(str, range(30)), "fail", "äö" * 200_000]:
                tg.start_soon(one, text)
        assert {text: reply.text for text, reply in found.items()} == {
            text: text for text in [*map(str, range(30)), "äö" * 200_000]
        }
        assert all(reply.model == "scorer" and reply.latency_s >= 0.05 for reply in found.values())
        assert len(failures) == 1
        assert "InternalServerError" in failures[0]
        assert len(callers()) == 2
        assert 1 < server.most <= 3
    assert callers() == []


async def test_a_process_that_dies_fails_its_calls_and_is_replaced() -> None:
    async with (
        ScoringServer(lambda _: "fine", delay_s=0.3).run() as server,
        open_complete(settings(server, workers=1)) as complete,
    ):
        assert (await complete(HELLO, None)).text == "fine"
        (process,) = callers()
        failed: list[str] = []

        async def call() -> None:
            try:
                await complete(HELLO, None)
            except ModelError as error:
                failed.append(str(error))

        async with anyio.create_task_group() as tg:
            tg.start_soon(call)
            while server.calls < 2:
                await anyio.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
        assert failed == ["the process that called the judge model died"]
        with anyio.fail_after(60):
            assert (await complete(HELLO, None)).text == "fine"


async def test_settings_that_can_t_be_used_are_one_clear_error() -> None:
    config = JudgeConfig(model="openai/x", api_key_env="NO_SUCH_KEY", workers=2)
    with pytest.raises(ConfigError, match="the environment has no NO_SUCH_KEY"):
        async with open_complete(config):
            pass
    assert callers() == []
