"""A power cut of a NATS server."""

import shutil
from pathlib import Path

import anyio.to_thread

from tests.conftest import NatsServer


class Power:
    """Cuts the power of a server: what it holds is what it held at `synced`."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self._server, self._copy = server, folder / "synced"

    async def synced(self) -> None:
        """The server wrote everything through to its disk now."""
        await anyio.to_thread.run_sync(self._synced)

    def _synced(self) -> None:
        self._server.kill()
        shutil.copytree(self._server.folder / "js", self._copy)
        self._server.start()

    async def cut(self, *, keep_consumers: bool = False) -> None:
        """Everything since `synced` is gone; with `keep_consumers` not what consumers had acknowledged by then."""
        await anyio.to_thread.run_sync(self._cut, keep_consumers)

    def _cut(self, keep_consumers: bool) -> None:
        self._server.kill()
        there = self._server.folder / "js"
        lost = there.rename(there.with_name("lost"))
        shutil.copytree(self._copy, there)
        if keep_consumers:
            for folder in lost.rglob("obs"):
                target = there / folder.relative_to(lost)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(folder, target)
        self._server.start()
