"""The folder of a model: its state, and what it logged, as JSON."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from journeywork.art.training import trains
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
        state: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / "state.json.new"
        temporary.write_text(json.dumps(state), "utf-8")
        temporary.replace(self.path / "state.json")

    def append_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Append a row to `history.jsonl`, without numbers that are none."""
        row = {n: v for n, v in metrics.items() if v == v} | {"step": step, "recorded_at": time.time()}
        self._append(self.path / "history.jsonl", [row])

    def best_step(self, metric: str) -> int | None:
        """Return the step with the highest mean of a metric in `history.jsonl`, the latest of equals; `None` without a
        row that has it."""
        file = self.path / "history.jsonl"
        values: dict[int, list[float]] = defaultdict(list)
        for line in file.read_text("utf-8").splitlines() if file.exists() else ():
            row = json.loads(line)
            if isinstance(row.get(metric), int | float):
                values[int(row["step"])].append(row[metric])
        return max(values, key=lambda step: (fmean(values[step]), step), default=None)

    def write_trajectories(self, groups: Sequence[TrajectoryGroup], split: str, step: int) -> None:
        """Append groups to the file of their split and step."""
        rows = [
            {
                "trajectories": [t.for_logging() for t in group.trajectories],
                "exceptions": [e.model_dump() for e in group.exceptions],
                "metadata": group.metadata,
                "metrics": group.metrics,
                "logs": group.logs,
            }
            for group in groups
        ]
        self._append(self.path / "trajectories" / split / f"{step:04}.jsonl", rows)

    def _append(self, file: Path, rows: Sequence[dict[str, Any]]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def in_groups(items: Sequence[Any]) -> list[TrajectoryGroup]:
    """Return what `model.log` was given as the groups whose means it logs: single trajectories are one group."""
    if items and all(isinstance(item, Trajectory | BaseException) for item in items):
        return [TrajectoryGroup(items)]
    return as_groups(items)


def summary(
    groups: Sequence[TrajectoryGroup], split_off: Callable[[Any], dict[str, float]]
) -> dict[str, float]:
    """Return the mean reward, its mean standard deviation within groups, the share of exceptions, and the means of all
    metrics that `split_off` returns: of trajectories over all trajectories, and as `group_<name>` of groups over the
    groups that have trajectories."""
    values: dict[str, list[float]] = defaultdict(list)
    deviations: list[float] = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        if len(rewards) > 1:
            deviations.append(pstdev(rewards))
        values["reward"] += rewards
        values["exception_rate"] += [0.0] * len(rewards) + [1.0] * len(group.exceptions)
        for prefix, metrics in (("group_", group.metrics), *(("", t.metrics) for t in group.trajectories)):
            for name, value in split_off(metrics).items():
                if rewards:
                    values[prefix + name].append(float(value))
    means = {name: fmean(numbers) for name, numbers in values.items() if numbers}
    return {**means, "reward_std_dev": fmean(deviations or [0.0])}


def counts(groups: Sequence[TrajectoryGroup], split: str) -> dict[str, float]:
    """Return how many groups and trajectories a step has, exceptions included."""
    numbers = {
        "scenarios": len(groups), "trajectories": sum(len(g.trajectories) + len(g.exceptions) for g in groups),
        "groups_submitted": len(groups), **({"groups_trainable": sum(map(trains, groups))} if split == "train" else {}),
    }  # fmt: skip
    return {f"data/step_num_{name}": float(number) for name, number in numbers.items()}


def step_metrics(metrics: Mapping[str, float], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the trainer's metrics of a step with the counts and the means (`train/<name>`) of all groups that it was
    given, in place of the trainer's, which are of the groups that it trained."""
    means = with_sections(summary(groups, dict), "train")
    return {
        **{name: value for name, value in metrics.items() if not name.startswith("train/")},
        **{name: value for name, value in means.items() if name.startswith("train/")},
        **counts(groups, "train"),
    }


def scenario_ids(groups: Sequence[TrajectoryGroup]) -> list[str]:
    """Return the scenarios that groups, or their first trajectories that name one, name in their metadata."""
    ids = []
    for group in groups:
        named = (
            m["scenario_id"] for m in (group.metadata, *(t.metadata for t in group)) if "scenario_id" in m
        )
        ids += [str(name) for name in list(named)[:1] if name is not None]
    return ids


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
