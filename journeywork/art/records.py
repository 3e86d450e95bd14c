"""The folder of a model: its state, and what it logged, as JSON."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from journeywork.art.trajectories import TrajectoryGroup


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
        """Append a row to `history.jsonl`."""
        row = {**metrics, "step": step, "recorded_at": time.time()}
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

    def write_trajectories(
        self, groups: Sequence[TrajectoryGroup], split: str, step: int
    ) -> dict[str, float]:
        """Append groups to the file of their split and step. Returns the means of their rewards and metrics, by
        `<split>/<name>`."""
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
        return {f"{split}/{name}": value for name, value in summary(groups).items()}

    def _append(self, file: Path, rows: Sequence[dict[str, Any]]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def summary(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the mean reward, its mean standard deviation within groups, the share of exceptions, and the means of all
    metrics but costs: of trajectories over all trajectories, of groups over the groups."""
    values: dict[str, list[float]] = defaultdict(list)
    exceptions = sum(len(group.exceptions) for group in groups)
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        if len(rewards) > 1:
            values["reward_std_dev"].append(pstdev(rewards))
        values["reward"] += rewards
        for metrics in (group.metrics, *(t.metrics for t in group.trajectories)):
            for name, value in metrics.items():
                if name.startswith("costs/"):
                    continue
                values[name].append(float(value))
    means = {name: fmean(numbers) for name, numbers in values.items() if numbers}
    attempts = exceptions + len(values["reward"])
    return {**means, "exception_rate": exceptions / attempts if attempts else 0.0}


def merge(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `into` with the entries of `more`; objects in both are merged, at every depth."""
    merged = dict(into)
    for name, value in more.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
