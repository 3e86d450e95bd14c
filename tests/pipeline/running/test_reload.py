"""A change of `nats.url` reaches the connections of a running service."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import Config, load
from pipeline.events import TrajectoryOpened
from pipeline.files import write_whole
from pipeline.log.broker import Broker
from pipeline.running import reload

pytestmark = pytest.mark.anyio


async def test_a_connection_moves_to_the_servers_of_the_changed_file(
    start_nats: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "CHECK_S", 60.0)  # SIGHUP is what is waited for
    old, new = start_nats(), start_nats()
    path = tmp_path / "config.toml"
    path.write_text(f'[nats]\nurl = "{old.url}"\n')
    config = load(path)
    async with (
        Broker.connect(config.nats) as broker,
        Broker.connect(load(path, [f"nats.url={new.url}"]).nats) as there,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(reload.watch_service, str(path), (), config)
        await anyio.wait_all_tasks_blocked()
        path.write_text("[nats\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await broker.publish(opened("before"))
        path.write_text(f'[nats]\nurl = "{new.url}"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        with anyio.fail_after(20):
            # Between two servers there is no address.
            while (
                getattr(broker.client.connected_url, "port", 0) != new.port or not broker.client.is_connected
            ):
                await anyio.sleep(0.01)  # nats-py tells of a new connection only at its start
        await broker.publish(opened("after"))
        assert [r.event.trajectory for r in await there.read(TrajectoryOpened)] == ["after"]
        async with Broker.connect(config.nats) as later:  # by the settings that the process started with
            assert later.client.connected_url.port == new.port
        tasks.cancel_scope.cancel()


async def test_listeners_get_changed_settings_and_others_need_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reload, "CHECK_S", 0.01)
    path = tmp_path / "config.toml"
    path.write_text('[vllm]\nurls = ["http://a:1"]\n')
    config = load(path)
    path.write_text('[vllm]\nurls = ["http://b:1"]\n')  # before it is looked at for the first time
    found: list[tuple[str, ...]] = []
    came = anyio.Event()

    async def listen(changed: Config) -> None:
        nonlocal came
        found.append(changed.vllm.urls)
        came.set()
        came = anyio.Event()

    async def write(text: str) -> None:
        waiting = came
        write_whole(path, text)
        await waiting.wait()

    with anyio.fail_after(30), reload.listening(listen):
        async with anyio.create_task_group() as tasks:
            waiting = came
            tasks.start_soon(reload.watch_service, str(path), (), config)
            await waiting.wait()
            await write('[vllm]\nurls = ["http://b:1", "http://c:1"]\nmax_loras = 7\n')
            tasks.cancel_scope.cancel()
    assert found == [("http://b:1",), ("http://b:1", "http://c:1")]
    (told,) = [r for r in caplog.records if r.message == "these settings have changed and need a restart"]
    assert told.fields == {"settings": ["vllm.max_loras"]}  # type: ignore[attr-defined]


def opened(trajectory: str) -> TrajectoryOpened:
    return TrajectoryOpened(project="p", trajectory=trajectory, model="m", group="g")
