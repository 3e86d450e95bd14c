"""Experiment trackers that get the curves too: W&B, trackio and MLflow, each through its own library.

A library is imported when its tracker is made. A model and branch is one run of the tracker. Its identity is the same
after a restart, so the run goes on. Where the tracker is, and who is logged in, is set by the library's environment
variables.
"""

from __future__ import annotations

import contextvars
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pipeline.config import Config
from pipeline.errors import ConfigError
from store.showing.curves.rows import Row

if TYPE_CHECKING:
    from wandb import Run


class Tracker(Protocol):
    """The runs of one project at a tracker. The methods block, and raise the library's own errors."""

    settles_s: float
    """Seconds after which a row that `add` took outlives a kill of this process, with a wide margin."""

    def add(self, row: Row) -> None:
        """Send a row. Rows of a model and branch come in the order of the log."""

    def close(self) -> None:
        """Finish the runs that were opened: every row outlives this process then. They can be opened again."""


class RunIdentity(msgspec.Struct, frozen=True):
    """What a tracker knows a model and branch by."""

    id: str
    """24 hexadecimal digits, from the project, the model, the branch and the run folder."""
    name: str
    """Model and branch as people read them, with the first digits of `id`, so that two run folders differ."""


class Runs(msgspec.Struct, frozen=True):
    """What is common to the trackers of a run folder."""

    project: str
    """The project at the tracker."""
    ours: str
    """The project on the log."""
    run_dir: Path
    folder: Path
    """Where the curves are."""

    def identity(self, row: Row, *of: str) -> RunIdentity:
        """Return the identity of the row's model and branch; `of` names a further run of theirs."""
        parts = (self.ours, row.model, row.branch, str(self.run_dir), *of)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        label = "-".join((row.model if row.branch == "main" else f"{row.model}+{row.branch}", *of))
        return RunIdentity(digest[:24], f"{label.replace('/', '_')}-{digest[:6]}")

    def facts(self, row: Row) -> dict[str, str]:
        """What is noted at a run."""
        return {"project": self.ours, "model": row.model, "branch": row.branch, "run_dir": str(self.run_dir)}


def numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.metrics.items() if value is not None}


class WandB:
    """Weights & Biases. It drops a step that is not above the last one of the run, and older versions may be evaluated
    after newer ones. So evaluations are a run of their own, whose steps are milliseconds of the log's time."""

    settles_s = 60.0  # its process writes its file every 15 seconds

    def __init__(self, runs: Runs) -> None:
        import wandb

        self._init, self._settings = wandb.init, wandb.Settings
        self._runs, self._open = runs, dict[str, "Run"]()

    def add(self, row: Row) -> None:
        identity = self._runs.identity(row, *(("evaluations",) if row.evaluation else ()))
        if identity.id not in self._open:
            self._open[identity.id] = run = self._init(
                project=self._runs.project, id=identity.id, name=identity.name, resume="allow",
                config=self._runs.facts(row), dir=os.environ.get("WANDB_DIR") or str(self._runs.folder),
                # Several runs in one process; the output and the load of the store service are no part of them.
                reinit="create_new", settings=self._settings(console="off", x_disable_stats=True),
            )  # fmt: skip
            if row.evaluation:
                run.define_metric("eval/step", hidden=True)
                run.define_metric("eval/*", step_metric="eval/step")
        values, step = numbers(row), row.step
        if row.evaluation:
            values, step = values | {"eval/step": row.step}, row.log_at // 1000
        # A step is held back until the next one, unless it is committed.
        self._open[identity.id].log(values, step=step, commit=True)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].finish()


class Trackio:
    """trackio. A run is found by its name."""

    settles_s = 10.0  # its thread writes every half second

    def __init__(self, runs: Runs) -> None:
        import trackio

        self._init = trackio.init
        self._runs, self._open = runs, dict[str, Any]()

    def add(self, row: Row) -> None:
        name = self._runs.identity(row).name
        if name not in self._open:
            # `init` finishes the run that it finds in the context, so each run gets a context of its own.
            self._open[name] = contextvars.Context().run(
                self._init, project=self._runs.project, name=name, resume="allow",
                config=self._runs.facts(row), embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip
        self._open[name].log(numbers(row), step=row.step)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].finish()


class MLflow:
    """MLflow. A run is found by its tag `journeywork.run`. A point has the time of its checkpoint, so that a point that
    is sent twice is the same one."""

    TAG = "journeywork.run"
    settles_s = 0.0  # the server has answered, or the file is written

    def __init__(self, runs: Runs) -> None:
        # The client alone has no database, which is MLflow's default.
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (runs.folder / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._client, self._metric = MlflowClient(uri), Metric
        self._runs, self._open = runs, dict[str, str]()

    def add(self, row: Row) -> None:
        identity = self._runs.identity(row)
        if identity.id not in self._open:
            self._open[identity.id] = self._find(identity, row)
        time_ms = round(row.at * 1000)
        metrics = [self._metric(name, value, time_ms, row.step) for name, value in numbers(row).items()]
        self._client.log_batch(self._open[identity.id], metrics=metrics)

    def _find(self, identity: RunIdentity, row: Row) -> str:
        """Return the run's id at MLflow; the run is created if there is none."""
        experiment = self._client.get_experiment_by_name(self._runs.project)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._runs.project)
        )
        found = self._client.search_runs([number], f"tags.`{self.TAG}` = '{identity.id}'", max_results=1)
        if found:
            run = str(found[0].info.run_id)
            self._client.update_run(run, status="RUNNING")
            return run
        tags = {f"journeywork.{name}": value for name, value in self._runs.facts(row).items()}
        created = self._client.create_run(number, run_name=identity.name, tags=tags | {self.TAG: identity.id})
        return str(created.info.run_id)

    def close(self) -> None:
        while self._open:
            self._client.set_terminated(self._open.popitem()[1])


TRACKERS: dict[str, Callable[[Runs], Tracker]] = {"wandb": WandB, "trackio": Trackio, "mlflow": MLflow}


def check_trackers(config: Config) -> None:
    """Raise `ConfigError` if the library of a tracker in `curves.trackers` is not installed."""
    for name in config.curves.trackers if config.curves.enabled else ():
        spec = importlib.util.find_spec(name)
        # A folder `wandb` in the working directory, as W&B makes one, is found too, but is no library.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"curves.trackers: the library of `{name}` is not installed: install it where the store service runs "
                f"(docs/install.md), or take `{name}` out of the setting"
            )


def runs_of(config: Config, folder: Path) -> Runs:
    project = config.curves.tracker_project or config.project
    return Runs(project, config.project, config.path().resolve(), folder)
