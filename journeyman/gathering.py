"""Run many attempts at many tasks at once, and compare policy versions on held-out tasks.

A rollout is a function of yours: it gets an open `Trajectory` and a task, lets your agent work, and returns the
reward (or sets `trajectory.reward`, or leaves it to the judge). An exception in a rollout completes its trajectory as
`no_result`, is kept in the result, and never becomes a reward."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar

import anyio
from typing_extensions import Unpack

from journeyman.statistics import Estimate, mean_of, paired_difference
from journeyman.trajectory import OpenOptions, Trajectory

Task = TypeVar("Task")
Rollout = Callable[[Trajectory, Task], float | Awaitable[float | None] | None]


class Client(Protocol):
    """What is needed of `AsyncJourneyman`."""

    def trajectory(
        self, model: str, **options: Unpack[OpenOptions]
    ) -> contextlib.AbstractAsyncContextManager[Trajectory]:
        """Open a run that is completed when the block ends."""


class GatherOptions(TypedDict, total=False):
    """Options of `gather` that `evaluate` and `compare` hand on."""

    concurrency: int
    max_exceptions: float
    name: Callable[[Any], str] | None
    describe: Callable[[Any], str] | None
    progress: bool


class TooManyExceptionsError(Exception):
    """More rollouts failed than `max_exceptions` allows. `exceptions` holds what they raised; the first is the
    cause."""

    def __init__(self, exceptions: Sequence[Exception], done: int, allowed: float) -> None:
        super().__init__(
            f"{len(exceptions)} of {done} rollouts raised, and max_exceptions allows {allowed:g}; the first: "
            f"{exceptions[0]!r}"
        )
        self.exceptions = tuple(exceptions)


@dataclass
class TaskGroup(Generic[Task]):
    """The attempts at one task, in the order of their numbers."""

    task: Task
    name: str
    """The group's name on the log."""
    trajectories: list[Trajectory] = field(default_factory=list)
    exceptions: list[Exception] = field(default_factory=list)
    """What rollouts of this task raised. Their trajectories are `no_result`."""

    @property
    def rewards(self) -> list[float]:
        """Rewards of the attempts that have one."""
        return [t.reward for t in self.trajectories if t.outcome == "scored" and t.reward is not None]


@dataclass(frozen=True)
class Evaluation:
    """What one model or policy version reached on some tasks."""

    model: str
    score: Estimate
    """Mean over the tasks' mean rewards."""
    rewards: tuple[float | None, ...]
    """Mean reward for each task in their order; `None` where no attempt had a result."""
    failed: int
    """Attempts that raised."""


@dataclass(frozen=True)
class Comparison:
    """Two evaluations on the same tasks. `difference` is second minus first over the tasks that both have a reward
    for."""

    first: Evaluation
    second: Evaluation
    difference: Estimate


@contextlib.contextmanager
def progress_bar(total: int, label: str, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that counts one more rollout. The bar needs a terminal and the package rich; without them
    nothing is shown."""
    bar: Any = None
    if shown:
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            bar = Progress(*columns, console=console) if console.is_terminal else None
    if bar is None:
        yield lambda: None
        return
    with bar:
        counter = bar.add_task(label, total=total)
        yield lambda: bar.advance(counter)


async def gather(
    client: Client,
    model: str,
    tasks: Iterable[Task],
    rollout: Rollout[Task],
    *,
    group_size: int = 8,
    concurrency: int = 64,
    max_exceptions: float = 0.1,
    name: Callable[[Task], str] | None = None,
    describe: Callable[[Task], str] | None = None,
    split: Literal["train", "val"] = "train",
    pinned: str = "",
    progress: bool = True,
) -> list[TaskGroup[Task]]:
    """Play `group_size` attempts at each task, `concurrency` at once, and return one `TaskGroup` for each task in
    their order.

    `rollout` may be a coroutine function, or a plain function that is then run in a thread. `name` gives a group's
    name; by default a name that no other call gives. `describe` gives the text of the task that the judge reads.
    `pinned` is a policy version. `max_exceptions` is a count (1 or more) or a share of all attempts (below 1). Raises
    `TooManyExceptionsError` beyond it, after the rollouts in flight were cancelled and completed as `no_result`;
    `ValueError` for a group or concurrency below 1."""
    if group_size < 1 or concurrency < 1:
        raise ValueError(f"group_size and concurrency are at least 1, not {group_size} and {concurrency}")
    prefix = f"g-{secrets.token_hex(5)}"
    groups = [TaskGroup(task, name(task) if name else f"{prefix}-{n}") for n, task in enumerate(tasks)]
    total = len(groups) * group_size
    allowed = max_exceptions if max_exceptions >= 1 else max_exceptions * total
    opened: list[dict[int, Trajectory]] = [{} for _ in groups]
    raised: list[Exception] = []
    done, slots = 0, anyio.Semaphore(concurrency)
    limiter = anyio.CapacityLimiter(concurrency)

    async def attempt(at: int, number: int, count: Callable[[], None]) -> None:
        nonlocal done
        group = groups[at]
        try:
            async with client.trajectory(
                model, group=group.name, group_size=group_size, attempt=number, split=split, pinned=pinned,
                task=describe(group.task) if describe else "",
            ) as run:  # fmt: skip
                opened[at][number] = run
                if inspect.iscoroutinefunction(rollout):
                    reward = await rollout(run, group.task)
                else:
                    found = await anyio.to_thread.run_sync(rollout, run, group.task, limiter=limiter)
                    reward = await found if inspect.isawaitable(found) else found
                if reward is not None:
                    run.reward = reward
        except Exception as error:  # noqa: BLE001  # whatever an agent raises is a result of its rollout; it is kept and counted
            group.exceptions.append(error)
            raised.append(error)
        finally:
            slots.release()
        done += 1
        count()
        if len(raised) > allowed:
            scope.cancel()

    with progress_bar(total, f"{model} {split}", progress) as count:
        async with anyio.create_task_group() as running:
            scope = running.cancel_scope
            for at in range(len(groups)):
                for number in range(group_size):
                    await slots.acquire()
                    running.start_soon(attempt, at, number, count)
    for group, runs in zip(groups, opened, strict=True):
        group.trajectories = [run for _, run in sorted(runs.items())]
    if len(raised) > allowed:
        raise TooManyExceptionsError(raised, done, max_exceptions) from raised[0]
    return groups


async def evaluate(
    client: Client,
    model: str,
    tasks: Iterable[Task],
    rollout: Rollout[Task],
    *,
    attempts: int = 1,
    **options: Unpack[GatherOptions],
) -> Evaluation:
    """Play held-out tasks with a model or a pinned version (`support@12`; `support@0` is the base model) and return
    its score.

    The trajectories have the split `val`, so nothing of them is trained. `options` as for `gather`."""
    name, at, _ = model.partition("@")
    groups = await gather(
        client, name, tasks, rollout, group_size=attempts, split="val", pinned=model if at else "", **options
    )
    means = tuple(sum(g.rewards) / len(g.rewards) if g.rewards else None for g in groups)
    failed = sum(len(g.exceptions) for g in groups)
    return Evaluation(model, mean_of([m for m in means if m is not None]), means, failed)


async def compare(
    client: Client,
    first: str,
    second: str,
    tasks: Iterable[Task],
    rollout: Rollout[Task],
    *,
    attempts: int = 1,
    **options: Unpack[GatherOptions],
) -> Comparison:
    """Evaluate two models or versions on the same tasks. The interval of the difference is paired by task."""
    listed = list(tasks)
    one = await evaluate(client, first, listed, rollout, attempts=attempts, **options)
    two = await evaluate(client, second, listed, rollout, attempts=attempts, **options)
    pairs = [(a, b) for a, b in zip(one.rewards, two.rewards, strict=True) if a is not None and b is not None]
    return Comparison(one, two, paired_difference([a for a, _ in pairs], [b for _, b in pairs]))
