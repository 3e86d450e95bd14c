"""Results of an evaluation: means with intervals, paired differences, cost and latency.

`playing` makes an `EntrantResult` of what one entrant (`entrants`) played, and an `EvaluationReport` of all of them.
A *measure* is the reward or a metric by its name. `report` prints the figures, and `request_body` is what the gateway
records of them. The first entrant is the baseline: the others' values are compared with its values, task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from journeywork.evaluation.entrants import Entrant
from journeywork.gathering import TaskGroup
from journeywork.statistics import Estimate, finite, mean_of, paired_difference
from journeywork.trajectory import Trajectory, Usage

REWARD = "reward"


@dataclass(frozen=True)
class TaskResult:
    """The attempts of one entrant at one task."""

    task: str
    values: dict[str, float]
    """Means over the attempts, by measure; a measure without a value is missing."""
    attempts: int
    failed: int
    trajectories: tuple[str, ...] = ()
    """Ids of the runs, which are on the log."""
    metadata: tuple[dict[str, Any], ...] = ()
    """What the rollout left in `run.metadata`, by attempt; attempts that left nothing are not in it."""


@dataclass(frozen=True)
class EntrantResult:
    """What one entrant achieved, and what that took."""

    entrant: Entrant
    version: str
    tasks: tuple[TaskResult, ...]
    usage: Usage
    """Of the calls of all runs."""
    runs_s: tuple[float, ...]
    """Seconds of each run, in ascending order."""
    wall_s: float
    errors: tuple[str, ...] = ()
    """What failed runs raised."""

    @property
    def failed(self) -> int:
        return sum(task.failed for task in self.tasks)

    @property
    def unrewarded(self) -> int:
        """Number of tasks without a reward, which the mean reward leaves out."""
        return sum(REWARD not in task.values for task in self.tasks)

    @property
    def runs(self) -> int:
        return sum(task.attempts for task in self.tasks)

    @property
    def call_s(self) -> float | None:
        """Mean seconds of a model call; `None` without calls."""
        return self.usage.calls_s / self.usage.calls if self.usage.calls else None

    def quantile_s(self, share: float) -> float | None:
        """Return the quantile `share` (0 to 1) of the seconds of a run; `None` without a run of known duration."""
        if not self.runs_s:
            return None
        return self.runs_s[min(int(len(self.runs_s) * share), len(self.runs_s) - 1)]

    def estimate(self, measure: str) -> Estimate:
        """Return the mean over the tasks that have a value."""
        return mean_of([t.values[measure] for t in self.tasks if measure in t.values])


@dataclass(frozen=True)
class EvaluationReport:
    """Entrants that played the same tasks. The first one is the baseline of the differences."""

    id: str
    scenarios: str
    rollout: str
    entrants: tuple[EntrantResult, ...]

    @property
    def measures(self) -> list[str]:
        """The reward, then every metric by name."""
        names = {name for e in self.entrants for t in e.tasks for name in t.values}
        return [name for name in (REWARD, *sorted(names - {REWARD})) if name in names]

    def difference(self, position: int, measure: str) -> Estimate:
        """Return the mean of the entrant's value minus the baseline's over the tasks for which both have one, with the
        interval of pairs. `position`: the entrant's place in `entrants`."""
        rows = zip(self.entrants[0].tasks, self.entrants[position].tasks, strict=True)
        pairs = [(a.values[measure], b.values[measure]) for a, b in rows if measure in a.values and measure in b.values]
        return paired_difference([before for before, _ in pairs], [after for _, after in pairs])

    def request_body(self, position: int) -> dict[str, Any]:
        """Return the results of an entrant as `POST /v1/evaluations` takes them."""
        result = self.entrants[position]
        return {
            "evaluation": self.id,
            "entrant": result.entrant.name,
            "position": position,
            "model": result.entrant.model,
            "version": result.version,
            "scenarios": self.scenarios,
            "rollout": self.rollout,
            "prompt": result.entrant.prompt,
            "measures": [self._measure(position, name) for name in self.measures],
            "tasks": [
                {
                    "task": task.task,
                    "reward": task.values.get(REWARD),
                    "metrics": {k: v for k, v in task.values.items() if k != REWARD},
                    "attempts": task.attempts,
                    "failed": task.failed,
                    "trajectories": task.trajectories,
                }
                for task in result.tasks
            ],
            "runs": result.runs,
            "failed": result.failed,
            "calls": result.usage.calls,
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "call_s": result.call_s,
            "run_p50_s": result.quantile_s(0.5),
            "run_p95_s": result.quantile_s(0.95),
            "wall_s": result.wall_s,
        }

    def _measure(self, position: int, name: str) -> dict[str, Any]:
        """Return a measure of an entrant as the event `policy.evaluated` has it (`pipeline.events.evaluation`)."""
        estimate = self.entrants[position].estimate(name)
        measure = {
            "name": name,
            "mean": estimate.mean if estimate.count else 0.0,
            "low": finite(estimate.low),
            "high": finite(estimate.high),
            "count": estimate.count,
        }
        if position:
            change = self.difference(position, name)
            measure |= {
                "difference": finite(change.mean),
                "difference_low": finite(change.low),
                "difference_high": finite(change.high),
                "pairs": change.count,
            }
        return measure


def result_of(
    entrant: Entrant, version: str, groups: Sequence[TaskGroup[int]], names: Sequence[str], attempts: int, wall_s: float
) -> EntrantResult:
    """Return the result of the groups that an entrant played; a group's task is its number in `names`.

    `attempts`: attempts per task, with those whose trajectory could not be opened. `wall_s`: seconds that all groups
    took."""
    runs = [run for group in groups for run in group.trajectories]
    usages = [run.usage for run in runs if run.usage is not None]
    prompt, completion = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    usage = Usage(sum(u.calls for u in usages), prompt, completion, sum(u.calls_s for u in usages))
    tasks = tuple(_task_result(group, names[group.task], attempts) for group in groups)
    errors = tuple(f"{type(e).__name__}: {e}" for group in groups for e in group.exceptions)
    seconds = tuple(sorted(run.duration_s for run in runs if run.duration_s is not None))
    return EntrantResult(entrant, version, tasks, usage, seconds, wall_s, errors)


def _task_result(group: TaskGroup[int], name: str, attempts: int) -> TaskResult:
    """Return the result of an entrant at the task `name`. Only completed runs with the outcome `scored` have values; an
    attempt failed if it raised, also while its trajectory was opened."""
    values: dict[str, list[float]] = {}
    for run in group.scored:
        for measure, value in _values(run).items():
            values.setdefault(measure, []).append(value)
    return TaskResult(
        name,
        {measure: math.fsum(of_runs) / len(of_runs) for measure, of_runs in values.items()},
        attempts,
        len(group.exceptions),
        tuple(run.id for run in group.trajectories),
        tuple(run.metadata for run in group.trajectories if run.metadata),
    )


def _values(run: Trajectory) -> dict[str, float]:
    """Return a run's metrics by name, and its reward, if it has one, as the measure `reward`."""
    result = run.result()
    reward = result.get("reward")
    return {**result.get("metrics", {}), **({} if reward is None else {REWARD: reward})}
