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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from journeywork.art.backend import AnyModel, AnyTrainableModel, UnsupportedError
from journeywork.art.dev import settings_of
from journeywork.art.local.finetuning import fine_tune, newest_model
from journeywork.art.model import TrainableModel
from journeywork.art.options import LEARNING_RATE, loss_settings
from journeywork.art.remote import RemoteBackend
from journeywork.art.training import TrainingError
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
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._starting = asyncio.Lock()
        atexit.register(self._stop)

    def run_dir(self, model: AnyModel) -> Path:
        """Return the run directory of a model's installation. Each fine-tuned base model has one of its own."""
        folder = self._folder(model)
        tuned = newest_model(folder)
        return folder / (f"journeywork-{tuned.name}" if tuned else "journeywork")

    def _folder(self, model: AnyModel) -> Path:
        return (self._path / model.project / "models" / model.name).resolve()

    def _base(self, model: AnyTrainableModel) -> str:
        return str(newest_model(self._folder(model)) or model.base_model)

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
            "models.0.base": self._base(model),
            "project": model.project,
        }
        flags = [
            part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")
        ]
        return [program, "up", "--run-dir", str(run_dir), *flags, *self._up_options]

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
        folder = self.run_dir(model).joinpath(
            "checkpoints", model.project, "main", model.name, f"step-{result.step:08d}"
        )
        return LocalTrainResult(result.step, result.metrics, str(folder) if folder.is_dir() else None)

    async def train_sft(
        self, model: AnyTrainableModel, chats: Iterable[Mapping[str, Any]], options: Sequence[str]
    ) -> None:
        """Fine-tune the base model of an installation that has trained no step yet: stop it, run `journeywork sft` with
        `options`, and start a new one, with an empty log, from the result.

        Raises `UnsupportedError` if the installation was not started here, has an inference server of its own, or has
        trained a step; `ValueError` without a chat, and `TrainingError` if the command fails."""
        chosen = list(chats)
        if not chosen:
            raise ValueError("train_sft: there is no trajectory to train on")
        run_dir, base = self.run_dir(model), self._base(model)
        process = self._started.get(run_dir)
        if process is None:
            raise UnsupportedError(
                "train_sft: only an installation that this program has started can change its base model. For this "
                f"one, run `journeywork sft OUT --base {base} --data chats.jsonl`, and start it with `models.0.base` "
                "at OUT"
            )
        fixed = ("vllm-url", "vllm.url", "models.0.base")
        if any(name in option for option in self._up_options for name in fixed):
            raise UnsupportedError(
                "train_sft: `up_options` names an inference server or a base model, which would keep the old weights; "
                f"leave out {', '.join(fixed)}"
            )
        if step := await self.get_step(model):
            raise UnsupportedError(
                f"train_sft: {model.name} has trained {step} steps of reinforcement learning, which a new base model "
                "would lose: fine-tune before the first step, or under another name of the model"
            )
        del self._started[run_dir], self._urls[str(run_dir)]
        await asyncio.to_thread(_end, [process])
        try:
            await fine_tune(_program(), base, chosen, self._folder(model), options)
        except TrainingError:
            await self.register(model)  # from the old base model
            raise
        await self.register(model)


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
