"""A supervisor that runs while a test looks."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from pipeline.config import Config
from pipeline.running.plan import ProcessSpec
from pipeline.running.supervisor import Supervisor, Watched


def runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


class Changes:
    """Waits for what a supervisor reports. `seen` has the state and the errors of each report."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self._event = anyio.Event()

    def __call__(self, watched: Watched) -> None:
        self.seen.append((watched.state, watched.errors))
        self._event.set()
        self._event = anyio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._event.wait()


@asynccontextmanager
async def supervised(
    config: Config, *specs: ProcessSpec, seconds: float = 100
) -> AsyncIterator[tuple[Supervisor, Changes]]:
    """A supervisor whose processes are ready; it stops them at the end."""
    changes = Changes()
    supervisor = Supervisor(config, [*specs], on_change=changes)
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as tg:
            await tg.start(supervisor.run)
            yield supervisor, changes
            supervisor.stop()
