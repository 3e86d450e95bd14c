"""Experiment trackers that get the curves too, each through its own library.

A library is imported when its tracker is made. A model and branch is one run of the tracker. Its identity is the same
after a restart, so the run goes on. Where the tracker is, and who is logged in, is set by the library's environment
variables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from pipeline.config import Config
from pipeline.errors import ConfigError
from store.showing.curves.rows import Row

if TYPE_CHECKING:
    from wandb import Run


class Tracker(Protocol):
    """The runs of one project at a tracker. The methods block, and raise the library's own errors."""

    def add(self, row: Row) -> None:
        """Send a row, unless the tracker holds it. Rows of a model and branch come in the order of the log, from its
        first one at each start."""

    def close(self) -> None:
        """Finish the runs that were opened: every row outlives this process then. They can be opened again."""


class Runs(msgspec.Struct, frozen=True):
    """What is common to the trackers of a run directory."""

    project: str
    """The project at the tracker."""
    ours: str
    """The project on the log."""
    run_dir: Path
    folder: Path
    """Where the curves are."""

    def identity(self, row: Row) -> tuple[str, str]:
        """Return what a tracker knows the row's model and branch by: one run for the steps, one for the evaluations.

        The id is 24 hexadecimal digits, from the project, the model, the branch and the run directory. The name is
        model and branch as people read them, with the first digits of the id, so that two run directories differ."""
        further = ("evaluations",) if row.evaluation else ()
        parts = (self.ours, row.model, row.branch, str(self.run_dir), *further)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        label = "-".join((row.model if row.branch == "main" else f"{row.model}+{row.branch}", *further))
        return digest[:24], f"{label.replace('/', '_')}-{digest[:6]}"

    def facts(self, row: Row) -> dict[str, str]:
        """What is noted at a run."""
        return {"project": self.ours, "model": row.model, "branch": row.branch, "run_dir": str(self.run_dir)}


class WandB:
    """Weights & Biases. It drops a step that is not above the last one of the run, and older versions may be evaluated
    after newer ones. So evaluations are a run of their own, whose steps are milliseconds of the log's time."""

    def __init__(self, runs: Runs) -> None:
        import wandb

        self._init, self._settings = wandb.init, wandb.Settings
        self._runs, self._open = runs, dict[str, "Run"]()

    def add(self, row: Row) -> None:
        run_id, name = self._runs.identity(row)
        if run_id not in self._open:
            self._open[run_id] = run = self._init(
                project=self._runs.project,
                id=run_id,
                name=name,
                resume="allow",
                config=self._runs.facts(row),
                dir=os.environ.get("WANDB_DIR") or str(self._runs.folder),
                # Several runs in one process; the output and the load of the store service are no part of them.
                reinit="create_new",
                settings=self._settings(console="off", x_disable_stats=True),
            )
            if row.evaluation:
                run.define_metric("eval/step", hidden=True)
                run.define_metric("eval/*", step_metric="eval/step")
        values, step = {name: value for name, value in row.metrics.items() if value is not None}, row.step
        if row.evaluation:
            values, step = values | {"eval/step": row.step}, row.log_at // 1000
        if step >= self._open[run_id].step:
            # Else an earlier start has sent it: W&B would drop it with a warning.
            # A step is held back until the next one, unless it is committed.
            self._open[run_id].log(values, step=step, commit=True)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].finish()


TRACKERS: dict[str, Callable[[Runs], Tracker]] = {"wandb": WandB}


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
