"""What a model logs: the JSON files of its folder, and its run at Weights & Biases.

`Model.log` (`journeywork.art.model`) writes a row of metrics for each call. A metric's name is `<split>/<name>` with
the split `train`, `val` or `test`, or `<section>/<name>` where ART has a section for it, such as `loss/grad_norm`."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from journeywork.art.training import can_train
from journeywork.art.trajectories import Trajectory, TrajectoryGroup, as_groups

SECTIONS = ("reward", "loss", "offpolicy", "pipeline", "throughput", "costs", "time", "data", "trainer")
"""ART's sections of metrics, and the trainer's own."""
SPLITS = ("train", "val", "test")


class RunFolder:
    """`state.json`, `history.jsonl` and `trajectories/<split>/<step>.jsonl` of one model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_state(self) -> dict[str, Any] | None:
        file = self.path / "state.json"
        if not file.exists():
            return None
        return dict(json.loads(file.read_text("utf-8")))

    def write_state(self, state: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / "state.json.new"
        temporary.write_text(json.dumps(state), "utf-8")
        temporary.replace(self.path / "state.json")

    def append_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Append a row to `history.jsonl`. NaN, which JSON does not know and which alone is unequal to itself, is left
        out."""
        row = {n: v for n, v in metrics.items() if v == v} | {"step": step, "recorded_at": time.time()}
        _append(self.path / "history.jsonl", [row])

    def write_trajectories(self, groups: Sequence[TrajectoryGroup], split: str, step: int) -> None:
        """Append groups to the file of their split and step."""
        rows = [
            {
                "trajectories": [t.for_logging() for t in group.trajectories],
                **group.model_dump(include={"exceptions", "metadata", "metrics", "logs"}),
            }
            for group in groups
        ]
        _append(self.path / "trajectories" / split / f"{step:04}.jsonl", rows)


def _append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows to a JSONL file, which is made if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(row, default=str) + "\n" for row in rows)


class StepMetrics:
    """What a program measures between two rows of a split: the sums of seconds and tokens, by the metric's name."""

    def __init__(self) -> None:
        self._values: dict[str, float] = defaultdict(float)

    def activate_context(self) -> AbstractContextManager[None]:
        """Return a block that does nothing: ART adds the costs of calls in it."""
        return nullcontext()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._values[name] += time.monotonic() - began

    def add_data(self, *, step_actor_tokens: int) -> None:
        """Add a number of sampled tokens."""
        self._values["data/step_actor_tokens"] += step_actor_tokens

    def take(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        values, self._values = self._values, defaultdict(float)
        return dict(values)


def in_groups(items: Sequence[Any]) -> list[TrajectoryGroup]:
    """Return what `model.log` was given as the groups whose means it logs: single trajectories are one group."""
    if items and all(isinstance(item, Trajectory | BaseException) for item in items):
        return [TrajectoryGroup(items)]
    return as_groups(items)


def summary(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the mean reward, its mean standard deviation within groups, the share of exceptions, and the means of all
    metrics: of trajectories over all trajectories, and as `group_<name>` of groups over the groups that have
    trajectories."""
    values: dict[str, list[float]] = defaultdict(list)
    deviations: list[float] = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        if len(rewards) > 1:
            deviations.append(pstdev(rewards))
        values["reward"] += rewards
        values["exception_rate"] += [0.0] * len(rewards) + [1.0] * len(group.exceptions)
        if rewards:
            for name, value in group.metrics.items():
                values[f"group_{name}"].append(float(value))
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                values[name].append(float(value))
    means = {name: fmean(numbers) for name, numbers in values.items() if numbers}
    return {**means, "reward_std_dev": fmean(deviations or [0.0])}


def counts(groups: Sequence[TrajectoryGroup], split: str) -> dict[str, float]:
    """Return how many groups and trajectories a step has, exceptions included."""
    numbers = {
        "scenarios": len(groups),
        "trajectories": sum(len(g.trajectories) + len(g.exceptions) for g in groups),
        "groups_submitted": len(groups),
        **({"groups_trainable": sum(map(can_train, groups))} if split == "train" else {}),
    }
    return {f"data/step_num_{name}": float(number) for name, number in numbers.items()}


def step_metrics(metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the trainer's metrics of a step with the counts and the means (`train/<name>`) of all groups that it was
    given, in place of the trainer's, which are of the groups that it trained."""
    means = with_sections(summary(groups), "train")
    return {
        **{name: value for name, value in metrics.items() if not name.startswith("train/")},
        **{name: value for name, value in means.items() if name.startswith("train/")},
        **counts(groups, "train"),
    }


def with_sections(metrics: Mapping[str, float], split: str) -> dict[str, float]:
    """Return metrics under the names of a row: `<split>/<name>`, unless a section or split begins the name already."""
    sections = (*SECTIONS, *SPLITS) if split in SPLITS else ()
    return {
        name if "/" in name and name.partition("/")[0] in sections else f"{split}/{name}": value
        for name, value in metrics.items()
    }


def merge(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `into` with the entries of `more`; objects in both are merged, at every depth."""
    merged = dict(into)
    for name, value in more.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def open_wandb_run(project: str, name: str) -> Any:
    """Begin the run of a model at Weights & Biases, or go on where an earlier program left it. `None` without the
    environment variable WANDB_API_KEY. Raises wandb's errors."""
    if "WANDB_API_KEY" not in os.environ:
        return None
    wandb: Any = importlib.import_module("wandb")
    run = wandb.init(project=project, name=name, id=name, resume="allow", reinit="create_new")
    run.define_metric("training_step")
    for prefix in (*SECTIONS, *SPLITS):  # curves over steps, so that rows of earlier ones may come later
        run.define_metric(f"{prefix}/*", step_metric="training_step")
    return run
