"""An installation on this machine as ART's backend."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from journeywork.art.backend import AnyModel, AnyTrainableModel
from journeywork.art.dev import settings_of
from journeywork.art.errors import UnsupportedError
from journeywork.art.local.copies import bucket_url, copy_logs, copy_version, steps_in, unpack_adapter
from journeywork.art.local.processes import (
    Installation,
    UpError,
    cause_of_end,
    program_of_up,
    state_of,
    stop_installations,
)
from journeywork.art.model import TrainableModel
from journeywork.art.options import LEARNING_RATE, loss_settings
from journeywork.art.remote import RemoteBackend
from journeywork.art.trajectories import AnyGroup
from journeywork.art.types import LocalTrainResult
from journeywork.forking import ForkError, Version, checkpoints_folder, flags, version_to_fork

log = logging.getLogger("journeywork.art")

_POLL_S = 0.1
"""Time between two looks at what another process writes: the state file of an installation that starts, the lake."""
_STORED_S = 300.0
"""How long the store may take to write the newest version."""


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
        such as `("--set", "trainer.loss.type=dapo")`. With `gpu_cost_per_hour_usd`, rows of the split `train` have
        the metric `costs/gpu`, for one GPU. `in_process` has no effect."""
        super().__init__()
        self.gpu_cost_per_hour_usd = gpu_cost_per_hour_usd
        self._path, self._up_options = Path(path or ".art"), tuple(up_options)
        self._urls: dict[str, str] = {}
        """URL of the gateway by run directory."""
        self._starts: dict[Path, str] = {}
        """Version from which a model's training begins, by run directory."""
        self._started: dict[Path, Installation] = {}
        self._starting = asyncio.Lock()

    def supports_automatic_train_step_metrics(self) -> bool:
        """Whether `model.log` adds `time/step_wall_s` and `costs/gpu` by itself: it does."""
        return True

    def automatic_gpu_cost_per_hour_usd(self, model: AnyModel) -> float | None:
        """Return the price of this backend's GPU."""
        return self.gpu_cost_per_hour_usd

    def run_dir(self, model: AnyModel) -> Path:
        """Return the run directory of a model's installation."""
        return (self._path / model.project / "models" / model.name / "journeywork").resolve()

    async def register(self, model: AnyModel) -> None:
        """Connect a model, as a `RemoteBackend` does. Its files go to the folder `path`, as in ART."""
        model.base_path = str(self._path)
        await super().register(model)

    # -- the installation ------------------------------------------------------------------------------------------

    async def url_of(self, model: AnyModel) -> str:
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
        state = state_of(run_dir)
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
        began = time.time()
        process = await asyncio.to_thread(self._launch, run_dir, model)
        while True:
            state = state_of(run_dir)
            if state.get("ready") and state.get("pid") == process.pid:
                return str(state["urls"]["gateway"])
            if (code := process.poll()) is not None:
                self._started.pop(run_dir, None)  # `close` may have taken it meanwhile
                cause = await asyncio.to_thread(cause_of_end, process, run_dir, began)
                raise UpError(f"`journeywork up` ended with status {code} before it was ready: {cause}")
            await asyncio.sleep(_POLL_S)  # another process writes the file

    def _launch(self, run_dir: Path, model: AnyModel) -> Installation:
        """Start an installation, if a caller that was cancelled has not started it."""
        process = self._started.get(run_dir)
        if process is not None and process.poll() is None:
            return process
        atexit.register(self._stop)
        self._started[run_dir] = Installation(self.command(run_dir, model))
        log.info("started an installation in %s", run_dir)
        return self._started[run_dir]

    def command(self, run_dir: Path, model: AnyModel) -> list[str]:
        """Return the command that starts the installation of a model. Raises `UpError` if it is not installed."""
        program = program_of_up()
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
        settings |= {"models.0.name": model.name, "models.0.base": model.base_model, "project": model.project}
        if start := self._starts.get(run_dir):
            settings["models.0.start"] = start
        return [program, "up", "--run-dir", str(run_dir), *flags(settings), *self._up_options]

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
            lake = str(bucket_url(from_s3_bucket, prefix))
        try:
            version = await asyncio.to_thread(
                version_to_fork, lake, project, from_model, not_after=not_after_step
            )
        except ForkError as error:
            raise UpError(str(error)) from error
        self._starts[run_dir] = f"{lake}#{version.name}"
        log.log(_level(verbose), "training begins with %s", self._starts[run_dir])

    async def _experimental_push_to_s3(
        self,
        model: AnyModel,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
    ) -> None:
        """Copy the model's folder and versions to a bucket (default: $BACKUP_BUCKET), those that are not there yet.
        Without a bucket nothing is copied. `delete` has no effect: a bucket keeps its versions.

        Raises `UnsupportedError` for an installation at a URL if a bucket is named, `TimeoutError` if the store does
        not write the newest version, and `OSError` if the bucket can't be written."""
        bucket = self._bucket(s3_bucket, prefix)
        if bucket is None or not isinstance(model, TrainableModel):
            return
        run_dir, step = self.run_dir(model), await self.get_step(model)
        lake = str(run_dir / "store")
        deadline = time.monotonic() + _STORED_S
        while True:
            steps = await asyncio.to_thread(steps_in, lake, model.project, model.name)
            if step in (0, *steps):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"version {step} of {model.name} did not come to {lake} within {_STORED_S:g} s: is the store "
                    "running, and is store.checkpoints not `none`?"
                )
            await asyncio.sleep(_POLL_S)  # another process writes the newest version
        for stored in steps:
            await asyncio.to_thread(copy_version, lake, bucket, model.project, model.name, stored)
        logs = f"{bucket}/{model.project}/models/{model.name}"
        await asyncio.to_thread(copy_logs, str(run_dir.parent), logs)
        log.log(_level(verbose), "%s is in %s", model.name, bucket)

    async def _experimental_pull_from_s3(
        self,
        model: AnyModel,
        *,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
        delete: bool = False,
        only_step: int | Literal["latest"] | None = None,
        step: int | None = None,
        exclude: list[str] | None = None,
        latest_only: bool = False,
    ) -> None:
        """Copy the model's folder and its newest version, or that of `step` (or of `only_step`, which wins), from a
        bucket (default: $BACKUP_BUCKET). The training of a model that has not begun here begins with it, optimizer
        included. Without a bucket, or for a model that has begun here, nothing is copied. `delete`, `exclude` and
        `latest_only` have no effect.

        Raises `UnsupportedError` for an installation at a URL, and `OSError` if the bucket can't be read."""
        bucket, run_dir = self._bucket(s3_bucket, prefix), self.run_dir(model)
        if bucket is None or (run_dir / "config.toml").exists():
            return
        chosen = step if only_step in (None, "latest") else only_step
        stored = await asyncio.to_thread(steps_in, bucket, model.project, model.name)
        pulled_step = max(stored, default=None) if chosen is None else chosen
        await asyncio.to_thread(
            copy_logs, f"{bucket}/{model.project}/models/{model.name}", str(run_dir.parent)
        )
        if pulled_step is None:
            return
        pulled = str(run_dir.with_name("pulled"))
        await asyncio.to_thread(copy_version, bucket, pulled, model.project, model.name, int(pulled_step))
        version = Version(model.project, "main", model.name, int(pulled_step))
        self._starts[run_dir] = f"{pulled}#{version.name}"
        log.log(_level(verbose), "training begins with %s", self._starts[run_dir])

    async def _experimental_pull_model_checkpoint(
        self,
        model: AnyModel,
        *,
        step: int | Literal["latest"] | None = None,
        local_path: str | None = None,
        s3_bucket: str | None = None,
        prefix: str | None = None,
        verbose: bool = False,
    ) -> str:
        """Return the folder of a version, a PEFT adapter: the newest one that this machine or the bucket holds, or that
        of `step`. It is unpacked into `local_path`, by default into `pulled/adapters/<step>` of the
        model's folder.

        Raises `UnsupportedError` for an installation at a URL if a bucket is named, `LookupError` if there is no such
        version, and `OSError`."""
        bucket = self._bucket(s3_bucket, prefix) if s3_bucket else None
        names, run_dir = (model.project, model.name), self.run_dir(model)
        lakes = [str(run_dir / "store"), str(run_dir.with_name("pulled")), *([bucket] if bucket else [])]
        lake_of = {
            n: lake for lake in reversed(lakes) for n in await asyncio.to_thread(steps_in, lake, *names)
        }
        chosen = max(lake_of, default=-1) if step in (None, "latest") else int(step)
        if chosen not in lake_of:
            raise LookupError(
                f"no version {'latest' if step is None else step} of {model.name} in {' or '.join(lakes)}"
            )
        # Not `checkpoints/<step>` of the model's folder: that is a link to the trainer's own checkpoint.
        folder = local_path or str(run_dir.with_name("pulled") / "adapters" / f"{chosen:04d}")
        version = Version(model.project, "main", model.name, chosen)
        await asyncio.to_thread(unpack_adapter, lake_of[chosen], version, folder)
        log.log(_level(verbose), "version %d of %s is in %s", chosen, model.name, folder)
        return folder

    def _bucket(self, s3_bucket: str | None, prefix: str | None) -> str | None:
        """Return the URL of a bucket, or `None` with a warning if none is named."""
        bucket = bucket_url(s3_bucket, prefix)
        if bucket is None:
            log.warning(
                "nothing is copied: no bucket is named (s3_bucket, or the environment variable BACKUP_BUCKET)"
            )
        elif self._url:
            raise UnsupportedError(
                f"the installation at {self._url} keeps its versions itself: set its store.dir to {bucket}"
            )
        return bucket

    async def close(self) -> None:
        """Close the clients of the registered models, and stop the installations that were started here. Those that
        were joined keep running."""
        await super().close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        stopping = list(self._started.values())
        self._started.clear()
        self._urls.clear()
        stop_installations(stopping)
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
        """As `RemoteBackend.train`. If the installation runs in `path`, the result names the folder of the checkpoint,
        and `<path>/<project>/models/<name>/checkpoints/<step>` is a link to it, as ART lays them out. A folder of that
        name, which ART left, stays."""
        result = await self._train(model, trajectory_groups, learning_rate, options)
        run_dir = self.run_dir(model)
        folder = run_dir / checkpoints_folder(model.project, model.name) / f"step-{result.step:08d}"
        if not folder.is_dir():
            return LocalTrainResult(result.step, result.metrics, None)
        arts = run_dir.with_name("checkpoints") / f"{result.step:04d}"
        arts.parent.mkdir(exist_ok=True)
        if arts.is_symlink() or not arts.exists():
            arts.unlink(missing_ok=True)
            arts.symlink_to(folder)
        return LocalTrainResult(result.step, result.metrics, str(folder))


def _level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.DEBUG


class OtherBackend(LocalBackend):
    """Stands in for one of ART's other backends: the installation trains and serves. Options beside `path` have no
    effect."""

    def __init__(self, *, path: str | None = None, **options: Any) -> None:
        super().__init__(path=path)
