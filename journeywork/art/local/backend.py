"""An installation on this machine as ART's backend.

An *installation* is what `journeywork up` runs in one folder, its run directory; `state.json` there says whether it is
ready and where its gateway is. `LocalBackend` finds or starts one, and is a `RemoteBackend` of its gateway then."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from journeywork.art.backend import RemoteBackend
from journeywork.art.dev import LEARNING_RATE, loss_settings, settings_of
from journeywork.art.local import processes
from journeywork.art.model import Model, TrainableModel

log = logging.getLogger("journeywork.art")

_POLL_S = 0.1
"""Time between two looks at the state file of an installation that starts."""


class LocalBackend(RemoteBackend):
    """Joins the installation of a model if it runs, and otherwise starts one with `journeywork up`.

    An installation per model: its run directory is `<path>/<project>/models/<name>/journeywork`. One that was started
    here ends with `close` or with the program; one that was joined keeps running. If
    $JOURNEYWORK_URL is set, the installation at that URL is used for every model.

    Starting one needs the package's extra `cpu` or `gpu` in the same environment."""

    def __init__(self, *, in_process: bool = False, path: str | None = None, up_options: Sequence[str] = ()) -> None:
        """`path` defaults to `.art` in the working directory. `up_options` are further arguments of `journeywork up`,
        such as `("--set", "trainer.loss.type=dapo")`. `in_process` has no effect."""
        super().__init__()
        self._path, self._up_options = Path(path or ".art"), tuple(up_options)
        self._urls: dict[str, str] = {}
        """URL of the gateway by run directory."""
        self._started: dict[Path, processes.Installation] = {}
        self._starting = asyncio.Lock()

    def run_dir(self, model: Model[Any]) -> Path:
        """Return the run directory of a model's installation."""
        return (self._path / model.project / "models" / model.name / "journeywork").resolve()

    async def register(self, model: Model[Any]) -> None:
        """Connect a model, as a `RemoteBackend` does. Its files go to the folder `path`, as in ART."""
        model.base_path = str(self._path)
        await super().register(model)

    # -- the installation ------------------------------------------------------------------------------------------

    async def url_of(self, model: Model[Any]) -> str:
        """Return the URL of the gateway that serves a model, and start its installation if none runs.

        Raises `UpError` if it does not start."""
        if self._url:
            return self._url
        run_dir = self.run_dir(model)
        async with self._starting:
            url = self._urls.get(str(run_dir)) or await self._join(run_dir)
            if url is None:
                url = await self._start(run_dir, model)
            self._urls[str(run_dir)] = url
        return url

    async def _join(self, run_dir: Path) -> str | None:
        """Return the URL of the gateway of an installation that runs, or `None`."""
        state = processes.state_of(run_dir)
        if not state.get("ready"):
            return None
        url = str(state["urls"]["gateway"])
        try:
            async with httpx.AsyncClient(timeout=10) as client:
                (await client.get(f"{url}/health")).raise_for_status()
        except httpx.HTTPError:
            return None
        log.info("joined the installation in %s", run_dir)
        return url

    async def _start(self, run_dir: Path, model: Model[Any]) -> str:
        """Start an installation and return its gateway's URL once it is ready. Raises `UpError` if it ends before."""
        began = time.time()
        process = await asyncio.to_thread(self._launch, run_dir, model)
        while True:
            state = processes.state_of(run_dir)
            if state.get("ready") and state.get("pid") == process.pid:
                return str(state["urls"]["gateway"])
            if (code := process.poll()) is not None:
                self._started.pop(run_dir, None)  # `close` may have taken it meanwhile
                cause = await asyncio.to_thread(processes.cause_of_end, process, run_dir, began)
                raise processes.UpError(f"`journeywork up` ended with status {code} before it was ready: {cause}")
            await asyncio.sleep(_POLL_S)  # another process writes the file

    def _launch(self, run_dir: Path, model: Model[Any]) -> processes.Installation:
        """Start an installation, and return its process; that of an earlier call if one was cancelled meanwhile."""
        process = self._started.get(run_dir)
        if process is not None and process.poll() is None:
            return process
        atexit.register(self._stop)
        self._started[run_dir] = processes.Installation(self.command(run_dir, model))
        log.info("started an installation in %s", run_dir)
        return self._started[run_dir]

    def command(self, run_dir: Path, model: Model[Any]) -> list[str]:
        """Return the command that starts the installation of a model. Raises `UpError` if it is not installed."""
        program = processes.program_of_up()
        if not isinstance(model, TrainableModel):
            raise processes.UpError(f"model {model.name!r} is not trainable, so no installation is started for it")
        settings, without_effect = settings_of(model._internal_config)
        if without_effect:
            log.warning("options without effect in _internal_config: %s (docs/art.md)", ", ".join(without_effect))
        # A step for which the program chooses nothing is trained as ART trains it.
        defaults = {"optimizer.learning_rate": LEARNING_RATE, **loss_settings()}
        settings = {f"trainer.{name}": value for name, value in defaults.items()} | settings
        settings |= {"models.0.name": model.name, "models.0.base": model.base_model, "project": model.project}
        return [program, "up", "--run-dir", str(run_dir), *processes.flags(settings), *self._up_options]

    async def close(self) -> None:
        """Close the clients of the registered models, and stop the installations that were started here. Those that
        were joined keep running."""
        await super().close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Stop what was started here: called by `close`, and at the program's end. Blocks until it has stopped."""
        stopping = list(self._started.values())
        self._started.clear()
        self._urls.clear()
        processes.stop_installations(stopping)
        atexit.unregister(self._stop)


class OtherBackend(LocalBackend):
    """Stands in for one of ART's other backends: the installation trains and serves. Options beside `path` have no
    effect."""

    def __init__(self, *, path: str | None = None, **options: Any) -> None:
        super().__init__(path=path)
