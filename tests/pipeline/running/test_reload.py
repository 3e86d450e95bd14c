"""A change of `nats.url` reaches the connections of a running service."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import load
from pipeline.events import TrajectoryOpened
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
        tasks.start_soon(reload.watch, str(path), (), config)
        await anyio.wait_all_tasks_blocked()
        path.write_text("[nats\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await broker.publish(opened("before"))
        path.write_text(f'[nats]\nurl = "{new.url}"\n')
        os.kill(os.getpid(), signal.SIGHUP)
        with anyio.fail_after(20):
            while broker.client.connected_url.port != new.port or not broker.client.is_connected:
                await anyio.sleep(0.01)  # nats-py tells of a new connection only at its start
        await broker.publish(opened("after"))
        assert [r.event.trajectory for r in await there.read(TrajectoryOpened)] == ["after"]
        tasks.cancel_scope.cancel()


def opened(trajectory: str) -> TrajectoryOpened:
    return TrajectoryOpened(project="p", trajectory=trajectory, model="m", group="g")
