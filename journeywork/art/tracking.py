"""The run of a model at Weights & Biases."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from journeywork.art.records import SECTIONS, SPLITS, merge

log = logging.getLogger("journeywork.art")

KEY = "WANDB_API_KEY"
_PREFIXES = (*SECTIONS, *SPLITS, "discarded")
"""Of metrics; their axis is `training_step`, so that rows of earlier steps may come later."""


class WandbRun:
    """A run named after the model, which begins with its first row and goes on where an earlier program left it. There
    is none without the environment variable WANDB_API_KEY."""

    def __init__(self, project: str, entity: str | None, name: str) -> None:
        self._project, self._entity, self._name = project, entity, name
        self._config: dict[str, Any] = {}
        self._run: Any = None

    def use(self, run: Any) -> None:
        """Log to a run that the program began, also without a key."""
        if run is self._run:
            return
        self._run = run
        _define_axis(run)
        if self._config:
            run.config.update(self._config, allow_val_change=True)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Merge values into the run's configuration, at every depth."""
        self._config = merge(self._config, dict(config))
        if self._run is not None:
            self._run.config.update(self._config, allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a row. An error of Weights & Biases is a warning: a step that was trained is not lost to it."""
        try:
            if (run := self.open()) is not None:
                run.log(dict(metrics))
        except Exception as error:  # noqa: BLE001 - wandb's errors have no common class
            log.warning("the metrics of step %d are not at Weights & Biases: %s", step, error)

    def open(self) -> Any:
        """Return wandb's run, which begins now if it has not; `None` without a key. Raises wandb's errors."""
        if self._run is None and KEY in os.environ:
            self._run = self._start()
        return self._run

    def _start(self) -> Any:
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(
            project=self._project, entity=self._entity, name=self._name, id=self._name, config=self._config or None,
            resume="allow", reinit="create_new",
        )  # fmt: skip
        _define_axis(run)
        return run


def _define_axis(run: Any) -> None:
    """Let the curves of a run be over training steps."""
    run.define_metric("training_step")
    for prefix in _PREFIXES:
        run.define_metric(f"{prefix}/*", step_metric="training_step")
