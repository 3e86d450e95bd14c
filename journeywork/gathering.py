"""Run several attempts per task concurrently.

A rollout is a function that you write: it takes an open `Trajectory` and a task, runs your agent, and returns the
reward. It may instead set `trajectory.reward`, or do neither and leave the reward to the judge. If a rollout raises,
its trajectory is completed with the outcome `no_result` and gets no reward; the exception is kept in the `TaskGroup`.
So is a `GatewayUnavailableError` of a completion, but that trajectory keeps its result: `complete(run.id,
**run.result())` completes it later.

`gather` is `client.gather` of the SDK; evaluations and loops (`journeywork.looping`) play by `call_rollout`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import operator
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import anyio
import anyio.from_thread
from typing_extensions import Unpack

from journeywork.trajectory import OpenOptions, Trajectory
from journeywork.transport import GatewayUnavailableError

Task = TypeVar("Task")
Rollout = Callable[[Trajectory, Task], float | Awaitable[float | None] | None]


class Client(Protocol):
    """The part of `AsyncJourneywork` that gatherings and evaluations use."""

    def trajectory(
        self, model: str, **options: Unpack[OpenOptions]
    ) -> contextlib.AbstractAsyncContextManager[Trajectory]:
        """Open a trajectory that is completed when the `with` block ends."""

    async def policies(self) -> list[dict[str, Any]]:
        """For each model: the version that its name stands for."""

    async def models(self) -> list[str]:
        """Names of the models and of their versions."""

    async def record_evaluation(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Record the results of an entrant on the log."""


class TooManyExceptionsError(Exception):
    """More rollouts raised than `max_exceptions` allows. `exceptions` holds all exceptions; the first is the cause."""

    def __init__(self, exceptions: Sequence[Exception], done: int, allowed: float) -> None:
        super().__init__(
            f"{len(exceptions)} of {done} rollouts raised, but max_exceptions allows {allowed:g}; "
            f"the first exception: {type(exceptions[0]).__name__}: {exceptions[0]}"
        )
        self.exceptions = tuple(exceptions)


@dataclass
class TaskGroup(Generic[Task]):
    """The attempts at one task."""

    task: Task
    name: str
    """The group's name on the log."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """In the order of the attempt numbers."""
    exceptions: list[Exception] = field(default_factory=list)
    """Exceptions raised by rollouts of this task, whose trajectories have the outcome `no_result`, and by the opening
    and the completion of trajectories."""

    @property
    def scored(self) -> list[Trajectory]:
        """Trajectories that were completed with the outcome `scored`."""
        return [t for t in self.trajectories if t.outcome == "scored" and t.duration_s is not None]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the completed attempts that have one."""
        return [t.reward for t in self.scored if t.reward is not None]


@contextlib.contextmanager
def progress_bar(total: int, label: str, shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each rollout. It counts on standard error, if that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    done = itertools.count(1)
    try:
        yield lambda: sys.stderr.write(f"\r{label} {next(done)}/{total}")
    finally:
        sys.stderr.write("\n")


@contextlib.contextmanager
def cancellation_as_failure(what: str) -> Iterator[None]:
    """Raise `RuntimeError`, which names `what`, if the block awaits something that was cancelled while the running task
    was not. A task group would take that for a cancellation of its own, and end all its tasks without an error."""
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError(f"{what} was cancelled: something that it awaited was") from error


async def call_rollout(rollout: Rollout[Task], run: Trajectory, task: Task, limiter: anyio.CapacityLimiter) -> None:
    """Await a rollout that is a coroutine function; run a plain function in a thread of `limiter`. A reward that it
    returns becomes the run's.

    Raises what the rollout raises, and `RuntimeError` if it calls `sys.exit`, or awaits something that was cancelled
    while the attempt itself was not."""
    try:
        with cancellation_as_failure("the rollout"):
            if inspect.iscoroutinefunction(rollout):
                reward = await rollout(run, task)
            else:
                result = await _call_in_thread(rollout, run, task, limiter)
                reward = await result if inspect.isawaitable(result) else result
    except SystemExit as error:  # one attempt's end, not the end of the program that plays them all
        raise RuntimeError(f"the rollout called sys.exit({error.code!r})") from error
    if reward is not None:
        run.reward = reward


async def _call_in_thread(
    rollout: Rollout[Task], run: Trajectory, task: Task, limiter: anyio.CapacityLimiter
) -> float | Awaitable[float | None] | None:
    """Return what a plain function returns, in a thread. There, `run.feedback` blocks until the event loop, which has
    the connections, has sent it."""
    send_feedback = run._send_feedback
    if send_feedback is not None:
        run._send_feedback = lambda *args, **options: anyio.from_thread.run(partial(send_feedback, *args, **options))
    try:
        result = await anyio.to_thread.run_sync(rollout, run, task, limiter=limiter, abandon_on_cancel=True)
    except (Exception, SystemExit):
        # Not for a cancellation: the thread goes on, and may still call it.
        run._send_feedback = send_feedback
        raise
    run._send_feedback = send_feedback
    return result


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
    """Run `group_size` attempts per task, at most `concurrency` at a time. Returns one `TaskGroup` per task, in order.

    `rollout` is a coroutine function, or a plain function, which runs in a thread; a plain function that is cancelled
    goes on in its thread until it returns. `name` returns the group name of a task; by default the name is random. A
    group that was scored takes no more runs, so give each pass over the tasks names of its own. `describe` returns the
    description of a task that the judge reads. `pinned` is the policy version that answers every call. `max_exceptions`
    is a count (1 or more) or a share of all attempts (below 1). If more rollouts raise, the others are cancelled and
    completed as `no_result`, and `TooManyExceptionsError` is raised. Raises `ValueError` if `group_size` or
    `concurrency` is below 1, `max_exceptions` below 0, or two tasks have one name, and `TypeError` for a rollout that
    is no function and for numbers that are not whole."""
    try:
        group_size, concurrency = operator.index(group_size), operator.index(concurrency)
    except TypeError:
        message = f"group_size and concurrency must be whole numbers, not {group_size!r} and {concurrency!r}"
        raise TypeError(message) from None
    if group_size < 1 or concurrency < 1:
        raise ValueError(f"group_size and concurrency must be at least 1, not {group_size} and {concurrency}")
    if not 0 <= max_exceptions < math.inf:
        raise ValueError(f"max_exceptions must be a number of at least 0, not {max_exceptions:g}")
    prefix = f"g-{secrets.token_hex(5)}"
    groups = [TaskGroup(task, name(task) if name else f"{prefix}-{n}") for n, task in enumerate(tasks)]
    if len({group.name for group in groups}) < len(groups):
        twice = Counter(group.name for group in groups).most_common(1)[0][0]
        raise ValueError(f"`name` returns {twice!r} for several tasks; each task needs a group of its own")
    if not callable(rollout):
        raise TypeError(f"rollout must be a function of a trajectory and a task, not {rollout!r}")
    options: OpenOptions = {"group_size": group_size, "split": split, "pinned": pinned}
    attempts = len(groups) * group_size
    share = round(max_exceptions * attempts, 6)  # 0.29 * 100 is 28.999999999999996
    most_raised = max_exceptions if max_exceptions >= 1 else share
    slots, threads = anyio.Semaphore(concurrency), anyio.CapacityLimiter(concurrency)  # one for each attempt that runs
    opened: list[dict[int, Trajectory]] = [{} for _ in groups]  # of each group, by attempt number
    exceptions: list[Exception] = []
    ended = 0

    async def attempt(group: TaskGroup[Task], runs: dict[int, Trajectory], number: int) -> None:
        """Play the attempt `number` of a group, and free its slot.

        An exception is put into the group, and the outcome becomes `no_result`, unless only the completion found no
        gateway. If it is one too many, all attempts are cancelled."""
        nonlocal ended
        began = time.monotonic()
        try:
            task = describe(group.task) if describe else ""
            opening: OpenOptions = {**options, "group": group.name, "attempt": number, "task": task}
            async with client.trajectory(model, **opening) as run:
                runs[number] = run
                await call_rollout(rollout, run, group.task, threads)
            run.duration_s = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 - kept and counted as the result of the rollout
            group.exceptions.append(error)
            exceptions.append(error)
            # One that the rollout raised has made it `no_result` already.
            if number in runs and not isinstance(error, GatewayUnavailableError):
                runs[number].outcome = "no_result"
        finally:
            slots.release()
        ended += 1
        count()
        if len(exceptions) > most_raised:
            scope.cancel()

    with progress_bar(attempts, f"{model} {split}", progress) as count, anyio.CancelScope() as scope:
        async with anyio.create_task_group() as running:
            for group, runs in zip(groups, opened, strict=True):
                for number in range(1, group_size + 1):
                    await slots.acquire()
                    running.start_soon(attempt, group, runs, number)
    if ended < attempts and not scope.cancel_called:
        raise RuntimeError(
            f"a rollout cancelled the task that plays it, and with it all others: {ended} of {attempts} attempts "
            "ended. Cancel a scope or a task of its own in the rollout"
        )
    for group, runs in zip(groups, opened, strict=True):
        group.trajectories = [run for _, run in sorted(runs.items())]
    if len(exceptions) > most_raised:
        raise TooManyExceptionsError(exceptions, ended, int(most_raised)) from exceptions[0]
    return groups
