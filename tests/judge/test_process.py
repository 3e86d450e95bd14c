"""The judge as a process, with a scoring server: whole groups from the log, and kill -9 in the middle. test_matrix.py
kills judges at each point."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import Config, JudgeConfig, NatsConfig, save, with_values
from pipeline.events import DeadLettered, GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from tests.conftest import NatsServer
from tests.judge.kit import completed, exchange
from tests.kits import quick_service
from tests.kits.scoring_server import Scorer, ScoringServer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("quick_redelivery")]


def configure(folder: Path, nats: NatsConfig, server: ScoringServer, **judge: Any) -> Path:
    path = folder / "config.toml"
    settings = {"model": "openai/scorer", "api_base": server.url, "concurrency": 4, **judge}
    save(Config(nats=nats, run_dir=str(folder), judge=with_values(JudgeConfig(), settings)), path)
    return path


@asynccontextmanager
async def judge_process(config: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Ready when it begins, stopped cleanly when the block ends unless it was killed."""
    reading, writing = os.pipe()
    with (config.parent / "judge.log").open("ab") as log:
        process = subprocess.Popen(
            quick_service.command("judge", "--config", str(config), "--ready-fd", str(writing)),
            pass_fds=[writing], stderr=log,
        )  # fmt: skip
    os.close(writing)
    try:
        with anyio.fail_after(120):
            line = await anyio.to_thread.run_sync(os.read, reading, 1000)
        assert line, (config.parent / "judge.log").read_text()[-2000:]
        yield process
        if process.poll() is None:
            process.terminate()
            assert await anyio.to_thread.run_sync(process.wait, 20) == 0
    finally:
        os.close(reading)
        if process.poll() is None:
            process.kill()
        process.wait()


async def play(broker: Broker, groups: int, members: int = 4, reward: float | None = None) -> None:
    limiter = anyio.CapacityLimiter(64)

    async def one(group: int, member: int) -> None:
        name = f"t{group}-{member}"
        async with limiter:
            await broker.publish(exchange(name, f"quality={(member + 1) / 10}", task=f"task {group}"))
            await broker.publish(completed(name, f"g{group}", reward, group_size=members, exchanges=1))

    async with anyio.create_task_group() as tg:
        for group in range(groups):
            for member in range(members):
                tg.start_soon(one, group, member)


async def scored(broker: Broker) -> list[GroupScored]:
    history = await broker.read(GroupScored)
    return [r.event for r in history]


async def until_scored(broker: Broker, count: int) -> list[GroupScored]:
    with anyio.fail_after(120):
        while len(found := await scored(broker)) < count:
            await anyio.sleep(0.05)
    return found


@pytest.mark.slow
async def test_groups_without_rewards_are_scored_by_the_model_and_a_kill_in_the_middle_scores_each_once(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    async with (
        ScoringServer(Scorer(first_bonus=0.1), delay_s=0.1).run() as server,
        Broker.connect(nats_config) as broker,
    ):
        config = configure(tmp_path, nats_config, server)
        await play(broker, 24)
        async with judge_process(config) as process:
            await until_scored(broker, 8)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert len(await scored(broker)) < 24
        async with judge_process(config):
            found = await until_scored(broker, 24)
            with anyio.fail_after(120):
                while await broker.lag("judge"):
                    await anyio.sleep(0.05)
        assert len(await scored(broker)) == len({g.group for g in found}) == 24
        assert await broker.read(GroupDiscarded) == []
        assert await broker.read(DeadLettered) == []
        assert server.most <= 4
    group = found[0]
    assert [m.trajectory for m in sorted(group.members, key=lambda m: m.reward)] == [
        f"t{group.group[1:]}-{i}" for i in range(4)
    ]
    assert all("ruler" in m.components for m in group.members)
    assert {v.rubric for v in group.verdicts} == {"general"}
    assert len(group.verdicts) == 2


async def test_a_group_whose_judge_model_never_answers_is_recorded(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    async with ScoringServer(lambda _: 500).run() as server, Broker.connect(nats_config) as broker:
        config = configure(tmp_path, nats_config, server, retry_for_s=1.0, **{"request.retries": 0})
        await play(broker, 1)
        async with judge_process(config):
            with anyio.fail_after(120):
                while not (gone := await broker.read(GroupDiscarded)):
                    await anyio.sleep(0.05)
                while await broker.lag("judge"):
                    await anyio.sleep(0.05)
    (event,) = [r.event for r in gone]
    assert getattr(event, "reason", "") == "unscored"
    assert "InternalServerError" in getattr(event, "detail", "")


async def test_the_log_s_server_dies_and_comes_back_while_groups_are_judged(
    nats_server: NatsServer, broker: Broker, nats_config: NatsConfig, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    save(Config(nats=nats_config, run_dir=str(tmp_path), judge=JudgeConfig(timeout_s=60)), config)
    async with judge_process(config):
        await play(broker, 3, reward=1.0)
        await until_scored(broker, 3)
        nats_server.kill()
        await anyio.to_thread.run_sync(nats_server.start)
        for member in range(4):
            await broker.publish(completed(f"x{member}", "after", 1.0, group_size=4))
        await until_scored(broker, 4)
        with anyio.fail_after(120):
            while await broker.lag("judge"):
                await anyio.sleep(0.05)
    assert len(await scored(broker)) == 4
