"""Choose tasks whose groups are likely to have different rewards. Standard library only.

GRPO learns from differences within a group: a group whose attempts all get the same reward trains nothing. `Curriculum`
estimates for each task the probability that a group of `group_size` attempts has different rewards, and samples tasks
in proportion to it. The estimate is Bayesian: the rewards of a task are draws from an unknown distribution over the
values seen so far, with a Dirichlet prior around the frequencies over all tasks (for rewards of 0 and 1 that is a Beta
posterior of the task's success). Because the policy changes, older rewards count less.

    tasks = Curriculum(train_set, key=lambda t: t.id, group_size=8)
    tasks.restore(read_history("support", run_dir="runs/support"))       # continue from an earlier process
    task = tasks.next()
    group, = client.gather("support", [task], play, describe=lambda t: t.id)
    tasks.record(task, group.rewards, step)

The idea is published: sampling by p(1 - p) in "Learning to Reason at the Frontier of Learnability" (Foster et al.,
arXiv 2502.12272), groups without variance left out in DAPO (Yu et al., arXiv 2503.14476), Bayesian estimates of a
prompt's success in MoPPS (Qu et al., arXiv 2507.04632). docs/decisions/sdk.md has measurements.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from journeywork.transport import JourneyworkError

Task = TypeVar("Task")

_DIGITS = 6
"""Rewards are compared with this many digits. The trainer too treats differences up to 1e-6 as equal."""

_MOST_VALUES = 64
"""Different rewards that are counted. Of more, the rare ones are dropped: a group hardly ever agrees on one of them."""


class Recorded(NamedTuple):
    """The reward of one earlier run."""

    task: str
    """The task's key."""
    step: int
    """The policy step that the run sampled from."""
    reward: float


@dataclass
class _Counts:
    """How often each reward was seen. Counts lose half their weight in `half_life` policy steps."""

    half_life: float
    step: int = 0
    weights: dict[float, float] = field(default_factory=dict)

    def at(self, step: int) -> dict[float, float]:
        """Return the counts as they weigh at a step; an earlier one counts as that of the newest reward."""
        factor = 0.5 ** (max(step - self.step, 0) / self.half_life)
        return {reward: weight * factor for reward, weight in self.weights.items()}

    def add(self, reward: float, step: int) -> None:
        if step > self.step:
            self.weights, self.step = self.at(step), step
        late = 0.5 ** ((self.step - step) / self.half_life)
        value = round(reward, _DIGITS)
        self.weights[value] = self.weights.get(value, 0.0) + late
        if len(self.weights) > _MOST_VALUES:
            kept = heapq.nlargest(_MOST_VALUES // 2, self.weights.items(), key=lambda item: item[1])
            self.weights = {**dict(kept), value: self.weights[value]}


class Curriculum(Generic[Task]):
    """Samples tasks by the probability that a group of attempts has different rewards.

    `key` returns the name of a task under which its history is kept; it should be the text that runs carry as `task`.
    `half_life` is in policy steps: what a task's rewards were says less the faster the policy learns. `prior` is the
    weight, in attempts, of what is known about all tasks in the estimate of one task. `explore` is the share of choices
    that are made uniformly, so that no task is given up for good.
    Raises `ValueError` for a value out of range, or two tasks of one key."""

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        key: Callable[[Task], str] = str,
        group_size: int = 8,
        half_life: float = 3.0,
        prior: float = 2.0,
        explore: float = 0.1,
        seed: Hashable = 0,
    ) -> None:
        if not tasks or group_size < 2:
            raise ValueError(
                f"a curriculum needs tasks and groups of 2 or more, not {len(tasks)} and {group_size}"
            )
        if half_life <= 0 or prior <= 0 or not 0 <= explore <= 1:
            raise ValueError(
                f"half_life and prior must be above 0 and explore from 0 to 1, not {half_life}, {prior}, {explore}"
            )
        self._tasks = {key(task): task for task in tasks}
        if len(self._tasks) != len(tasks):
            raise ValueError(
                f"{len(tasks)} tasks have {len(self._tasks)} different keys; `key` must tell them apart"
            )
        self._key, self._group_size = key, group_size
        self._half_life, self._prior, self._explore = half_life, prior, explore
        self._random = random.Random(f"curriculum/{seed}")
        self._all = _Counts(half_life)
        self._seen: dict[str, _Counts] = {}
        self._playing: set[str] = set()

    @property
    def step(self) -> int:
        """The newest policy step that a recorded reward is of."""
        return self._all.step

    def next(self) -> Task:
        """Return a task to make a group of. It is not chosen again until `record` is called for it, unless no other
        task is left."""
        free = [name for name in self._tasks if name not in self._playing] or list(self._tasks)
        weights = [1.0] * len(free)
        if self._random.random() >= self._explore:
            estimates = self._probabilities(free)
            weights = estimates if math.fsum(estimates) > 0 else weights
        (name,) = self._random.choices(free, weights)
        self._playing.add(name)
        return self._tasks[name]

    def task(self, key: str) -> Task:
        """Return the task of a key. Raises `KeyError` if there is none."""
        return self._tasks[self._known(key)]

    def _known(self, key: str) -> str:
        if key not in self._tasks:
            raise KeyError(f"the curriculum has no task with the key {key!r}")
        return key

    def record(self, task: Task, rewards: Iterable[float], step: int = 0) -> None:
        """Keep the rewards of a group, sampled from the policy at `step`. No rewards: the group failed.

        Raises `KeyError` for a task that the curriculum does not have, and `ValueError` for a reward that is not
        finite; nothing is kept then."""
        name = self._known(self._key(task))
        self.restore(Recorded(name, step, reward) for reward in rewards)
        self._playing.discard(name)

    def restore(self, history: Iterable[Recorded]) -> int:
        """Take rewards of earlier runs, such as `read_history` returns, the oldest first. Rewards of other tasks are
        left out. Returns the number of rewards taken. Raises `ValueError`, and takes none, if one is not finite."""
        ours = [recorded for recorded in history if recorded.task in self._tasks]
        for name, _, reward in ours:
            if not math.isfinite(reward):
                raise ValueError(f"a reward of the task {name!r} is {reward}; it must be finite")
        for name, step, reward in ours:
            self._seen.setdefault(name, _Counts(self._half_life)).add(reward, step)
            self._all.add(reward, step)
        return len(ours)

    def probability(self, task: Task) -> float:
        """Return the probability that a group of `task` has different rewards. 1 before any reward is known."""
        return self._probabilities([self._key(task)])[0]

    def _probabilities(self, names: Sequence[str]) -> list[float]:
        everywhere = self._all.at(self.step)
        total = math.fsum(everywhere.values())
        if not total:
            return [1.0] * len(names)
        prior = {reward: self._prior * weight / total for reward, weight in everywhere.items()}
        unseen = self._of_equal(prior, {})
        return [
            1.0 - (self._of_equal(prior, self._seen[name].at(self.step)) if name in self._seen else unseen)
            for name in names
        ]

    def _of_equal(self, prior: dict[float, float], seen: dict[float, float]) -> float:
        """Return the probability that all rewards of a group are equal: one draw after the other from the posterior,
        which is Pólya's urn."""
        mass = self._prior + math.fsum(seen.values())
        return math.fsum(
            math.prod(
                (prior.get(reward, 0.0) + seen.get(reward, 0.0) + drawn) / (mass + drawn)
                for drawn in range(self._group_size)
            )
            for reward in prior.keys() | seen.keys()
        )


_HISTORY = """
SELECT t.task AS task, coalesce(r.last_step, 0) AS step, r.reward AS reward
FROM rewards r JOIN trajectories t USING (project, model, trajectory)
WHERE r.model = '{model}' AND r.outcome = 'scored' AND r.split = 'train' AND r.reward IS NOT NULL AND t.task <> ''
ORDER BY r.scored_at, t.stream_seq
"""


def read_history(model: str, run_dir: str | Path = "") -> list[Recorded]:
    """Return the rewards of all scored training runs of a model, the oldest first, from the history of an installation.

    Runs `journeywork sql`, which needs the package's extra `store`. `run_dir` is as for that command: by default the
    run of the newest `journeywork up`. Raises `JourneyworkError` with its message if it fails."""
    if not model.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"{model!r} is not a model's name")
    where = ["--run-dir", str(run_dir)] if run_dir else []
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "sql",
        *where,
        "--format",
        "json",
        _HISTORY.format(model=model),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JourneyworkError(f"the history could not be read: {done.stderr.strip() or done.stdout.strip()}")
    return [Recorded(row["task"], row["step"], row["reward"]) for row in json.loads(done.stdout)]
