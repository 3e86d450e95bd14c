"""A sampler agent in a thread of the test's process: no process to start, everything else real."""

from concurrent.futures import Future
from contextlib import ExitStack

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from pipeline.config import Config
from rollout_gateway.sampler import service


async def run(config: Config, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
    """Run the agent of the inference servers in `config.vllm.urls`. It has started when it follows the log."""
    await service.serve(config, lambda **_: task_status.started())


class SamplerThread:
    """The agent; `stop` and `start` again as often as needed. It runs in an event loop and a thread of its own, which
    end with it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._scope: anyio.CancelScope  # of the loop that runs the agent
        self._running: tuple[ExitStack, BlockingPortal, Future[None]] | None = None

    def start(self) -> None:
        """Return once the agent follows the log. Raises what it ended with if it did not get there."""
        with ExitStack() as stack:  # ends the thread if the agent does not start
            portal = stack.enter_context(start_blocking_portal())
            ended, _ = portal.start_task(self._run)
            self._running = stack.pop_all(), portal, ended

    async def _run(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._scope:
            await run(self.config, task_status=task_status)

    def stop(self) -> None:
        """As SIGTERM does. Returns once the thread has ended. Raises what the agent ended with, before this or because
        of it."""
        if self._running is None:
            return
        (stack, portal, ended), self._running = self._running, None
        with stack:
            portal.call(self._scope.cancel)
            ended.result()
