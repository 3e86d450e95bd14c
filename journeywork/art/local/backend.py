"""An installation on this machine as ART's backend."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from journeywork.art.backend import AnyModel, AnyTrainableModel
from journeywork.art.dev import settings_of
from journeywork.art.folders import checkpoints_folder
from journeywork.art.model import TrainableModel
from journeywork.art.options import LEARNING_RATE, loss_settings
from journeywork.art.remote import RemoteBackend
from journeywork.art.trajectories import AnyGroup
from journeywork.art.types import LocalTrainResult

log = logging.getLogger("journeywork.art")

_POLL_S = 0.1
"""Time between two looks at the state file of an installation that starts."""
_STOP_S = 120.0
"""How long an installation may take to stop."""
_LOG_BYTES = 2000
"""Bytes of the supervisor's log in an error message."""


class UpError(Exception):
    """`journeywork up` ended before the installation was ready. The message holds the end of its log."""


class LocalBackend(RemoteBackend):
    """Joins the installation of a model if it runs, and otherwise starts one with `journeywork up`.

    An installation per model: its run directory is `<path>/<project>/models/<name>/journeywork`. One that was started
    here ends with `close`, with the `with` block, or with the program; one that was joined keeps running. If
    $JOURNEYWORK_URL is set, the installation at that URL is used for every model.

    Starting one needs the package's extra `cpu` or `gpu` in the same environment."""

    def __init__(
        self,
        *,
        in_process: bool = False,
        path: str | None = None,
        gpu_cost_per_hour_usd: float | None = None,
        up_options: Sequence[str] = (),
    ) -> None:
        """`path` defaults to `.art` in the working directory. `up_options` are further arguments of `journeywork up`,
        such as `("--set", "trainer.loss.type=dapo")`. `in_process` and `gpu_cost_per_hour_usd` have no effect."""
        super().__init__()
        self._path, self._up_options = Path(path or ".art"), tuple(up_options)
        self._urls: dict[str, str] = {}
        """URL of the gateway by run directory."""
        self._starts: dict[Path, str] = {}
        """Version from which a model's training begins, by run directory."""
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._starting = asyncio.Lock()
        atexit.register(self._stop)

    def run_dir(self, model: AnyModel) -> Path:
        """Return the run directory of a model's installation."""
        return (self._path / model.project / "models" / model.name / "journeywork").resolve()

    # -- the installation ------------------------------------------------------------------------------------------

    async def url_of(self, model: AnyModel) -> str:
        """Return the URL of the gateway that serves a model, and start its installation if none runs.

        Raises `UpError` if it does not start."""
        if self._url:
            return self._url
        run_dir = self.run_dir(model)
        async with self._starting:
            found = self._urls.get(str(run_dir)) or await self._join(run_dir)
            if found is None:
                found = await self._start(run_dir, model)
            self._urls[str(run_dir)] = found
        return found

    async def _join(self, run_dir: Path) -> str | None:
        """Return the URL of the gateway of an installation that runs, or `None`."""
        state = _state(run_dir)
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

    async def _start(self, run_dir: Path, model: AnyModel) -> str:
        process = await asyncio.to_thread(
            subprocess.Popen,
            self.command(run_dir, model),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the program, which then stops the installation
        )
        self._started[run_dir] = process
        log.info("started an installation in %s", run_dir)
        while True:
            state = _state(run_dir)
            if state.get("ready") and state.get("pid") == process.pid:
                return str(state["urls"]["gateway"])
            if (code := process.poll()) is not None:
                del self._started[run_dir]
                raise UpError(
                    f"`journeywork up` ended with status {code} before it was ready: {_end_of_log(run_dir)}"
                )
            await asyncio.sleep(_POLL_S)  # another process writes the file

    def command(self, run_dir: Path, model: AnyModel) -> list[str]:
        """Return the command that starts the installation of a model. Raises `UpError` if it is not installed."""
        program = _program()
        if not isinstance(model, TrainableModel):
            raise UpError(f"model {model.name!r} is not trainable, so no installation is started for it")
        settings, without_effect = settings_of(model._internal_config)
        if without_effect:
            log.warning(
                "options without effect in _internal_config: %s (docs/art.md)", ", ".join(without_effect)
            )
        # A step for which the program chooses nothing is trained as ART trains it.
        defaults = {"optimizer.learning_rate": LEARNING_RATE, **loss_settings({})}
        settings = {f"trainer.{name}": v for name, v in defaults.items() if v is not None} | settings
        settings |= {
            "models.0.name": model.name,
            "models.0.base": model.base_model,
            "project": model.project,
        }
        if start := self._starts.get(run_dir):
            settings["models.0.start"] = start
        flags = [
            part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")
        ]
        return [program, "up", "--run-dir", str(run_dir), *flags, *self._up_options]

    async def _experimental_fork_checkpoint(
        self,
        model: AnyModel,
        from_model: str,
        from_project: str | None = None,
        from_s3_bucket: str | None = None,
        not_after_step: int | None = None,
        verbose: bool = False,
        prefix: str | None = None,
    ) -> None:
        """Let the training of `model` begin with a version of another model, optimizer included. Call it before
        `register`.

        It is the newest version, or the newest up to step `not_after_step`, that the lake of the other model's
        installation in `path` holds; with `from_s3_bucket`, the lake at `prefix` in that bucket. Raises `UpError` if
        there is none, or if the installation of `model` runs or has run."""
        run_dir, project = self.run_dir(model), from_project or model.project
        if (run_dir / "config.toml").exists():
            raise UpError(
                f"{model.name} has begun already, in {run_dir}: fork before `register`, or to another name"
            )
        lake = str(self._path.resolve() / project / "models" / from_model / "journeywork" / "store")
        if from_s3_bucket:
            lake = "s3://" + "/".join(filter(None, (from_s3_bucket, (prefix or "").strip("/"))))
        steps = await asyncio.to_thread(_forkable_steps, lake, project, from_model)
        if not_after_step is not None:
            steps = [step for step in steps if step <= not_after_step]
        if not steps:
            raise UpError(f"{lake} holds no version of {from_model} in project {project} that can be forked")
        self._starts[run_dir] = f"{lake}#{project}/main/{from_model}@{max(steps)}"
        log.log(logging.INFO if verbose else logging.DEBUG, "training begins with %s", self._starts[run_dir])

    async def close(self) -> None:
        """Close the clients of the registered models, and stop the installations that were started here. Those that
        were joined keep running."""
        await super().close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        stopping = list(self._started.values())
        self._started.clear()
        self._urls.clear()
        _end(stopping)
        atexit.unregister(self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    # -- training --------------------------------------------------------------------------------------------------

    async def train(
        self,
        model: AnyTrainableModel,
        trajectory_groups: Iterable[AnyGroup],
        *,
        learning_rate: float | None = None,
        **options: Any,
    ) -> LocalTrainResult:
        """As `RemoteBackend.train`. The result names the folder of the checkpoint if the installation runs in
        `path`."""
        result = await self._train(model, trajectory_groups, learning_rate, options)
        folder = (
            self.run_dir(model) / checkpoints_folder(model.project, model.name) / f"step-{result.step:08d}"
        )
        return LocalTrainResult(result.step, result.metrics, str(folder) if folder.is_dir() else None)


def _forkable_steps(lake: str, project: str, model: str) -> list[int]:
    """Return the steps of the versions of a model that a lake holds whole, in no order. Blocks.

    `lake` is the path of a folder or an `s3://` URL. Raises `OSError` if object storage cannot be read."""
    from pyarrow import fs  # not a dependency of the SDK alone; an installation has it

    files, root = fs.FileSystem.from_uri(lake)
    folder = f"{root}/{checkpoints_folder(project, model)}"
    entries = files.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=True))
    # The store writes the event last: a folder without it is a copy that was interrupted.
    events = (Path(entry.path) for entry in entries if entry.base_name == "event.msgpack")
    return [int(event.parent.name.removeprefix("step-")) for event in events]


def _program() -> str:
    """Return the command `journeywork`. Raises `UpError` if it is not installed."""
    beside = Path(sys.executable).with_name("journeywork")
    program = str(beside) if beside.exists() else shutil.which("journeywork")
    if program is None:
        raise UpError(
            "the command `journeywork` is not installed here: install the extra `cpu` or `gpu`, or set "
            "JOURNEYWORK_URL to the gateway of an installation that runs elsewhere"
        )
    return program


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop installations. Blocks until they have stopped."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _state(run_dir: Path) -> dict[str, Any]:
    """Return what the installation in a run directory says of itself; empty if there is none."""
    try:
        state: dict[str, Any] = json.loads((run_dir / "state.json").read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return state


def _end_of_log(run_dir: Path) -> str:
    try:
        text = (run_dir / "logs" / "supervisor.log").read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace")
    except FileNotFoundError:
        return "it wrote no log; its error is on standard error"
    return f"the end of {run_dir}/logs/supervisor.log is:\n{text}"
