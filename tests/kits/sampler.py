"""A sampler agent in a thread of the test's process: no process to start, everything else real."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.config import Config
from rollout_gateway.sampler import service


async def run(config: Config, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
    """Run the agent of the inference servers in `config.vllm.urls`. It has started when it follows the log."""
    await service.serve(config, lambda **_: task_status.started())


class SamplerThread:
    """The agent; `stop` and `start` again as often as needed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._portal: AbstractContextManager[BlockingPortal] | None = None
        self._running: Future[Any] | None = None

    def start(self) -> None:
        self._portal = start_blocking_portal()
        self._running, _ = self._portal.__enter__().start_task(run, self.config)

    def stop(self) -> None:
        """As SIGTERM does. Raises what the agent ended with."""
        if self._portal is None or self._running is None:
            return
        portal, running, self._portal = self._portal, self._running, None
        ended = running.done()
        running.cancel()
        portal.__exit__(None, None, None)
        if ended:
            running.result()
