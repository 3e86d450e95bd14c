"""Play scenarios while the trainer trains: bounded staleness, evaluation every few steps, and a resume from the log.

    async with AsyncJourneywork(url) as client:
        result = await loop(client, "support", scenarios, play, name="night-1", steps=100, groups_per_step=16,
                            max_staleness=2, evaluate_every=10, evaluation=held_out)

Every attempt has an id that follows from the loop's name and its place: `<name>-<scenario>-<attempt>`. A loop that is
started again under its name asks the gateway which attempts were completed and plays the rest. Nothing is kept on this
machine. An attempt whose process died is completed as `no_result` and played again in a group of its own; so is an
attempt whose rollout raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

import anyio

from journeywork.attempts import Attempts, Progress, ReadingClient
from journeywork.curriculum import Curriculum, Recorded
from journeywork.gathering import Client, Rollout, Task, TooManyExceptionsError, call_rollout
from journeywork.statistics import Estimate, mean_of_share
from journeywork.trajectory import Trajectory
from journeywork.transport import NOT_FOUND, JourneyworkError, plain_errors

_MAX_NAME = 150
"""Characters of a loop's name. The gateway takes 200 for an id, which also holds the attempt's place."""


class LoopClient(ReadingClient, Client, Protocol):
    """The part of `AsyncJourneywork` that this module uses."""

    async def policies(self) -> list[dict[str, Any]]: ...

    async def group(self, group: str, model: str = "") -> dict[str, Any]: ...


@dataclass
class LoopResult:
    """What a loop did, the part before a restart included."""

    step: int = 0
    """The policy step that was served at the end."""
    played: int = 0
    """Attempts that this process completed."""
    resumed: int = 0
    """Attempts that were complete when it started."""
    incomplete: list[int] = field(default_factory=list)
    """Numbers of scenarios that have fewer completed attempts than wished, after all tries."""
    evaluations: dict[int, Estimate] = field(default_factory=dict)
    """The mean reward of the held-out tasks by policy step."""
    not_evaluated: list[int] = field(default_factory=list)
    """Steps whose version the gateway did not have any more when their evaluation was due, after a restart."""
    staleness: list[int] = field(default_factory=list)
    """For each trained group, in how many steps it became older between its start and its training."""
    exceptions: list[Exception] = field(default_factory=list)
    """What rollouts raised."""


class _Loop(Generic[Task]):
    """One running loop. `loop` describes the parameters."""

    def __init__(
        self,
        client: LoopClient,
        model: str,
        rollout: Rollout[Task],
        *,
        name: str,
        steps: int,
        groups_per_step: int,
        group_size: int,
        concurrency: int,
        max_staleness: int,
        tries: int,
        max_exceptions: int,
        describe: Callable[[Task], str] | None,
        poll_s: float,
    ) -> None:
        self._client, self._model, self._rollout = client, model, rollout
        self.attempts = Attempts(
            client, model, name=name, size=group_size, tries=tries, concurrency=concurrency
        )
        self._steps = steps
        self._ahead = (max_staleness + 1) * groups_per_step
        """Groups that may be under way or waiting to be trained, so that none becomes older than `max_staleness`."""
        self._tries, self._max_exceptions, self._describe, self._poll_s = (
            tries,
            max_exceptions,
            describe,
            poll_s,
        )
        self._slots = anyio.Semaphore(concurrency)
        self._limiter = anyio.CapacityLimiter(concurrency)
        self._turn = anyio.Lock()
        """Held while a group takes its slots, so that groups begin in their order and a few at a time."""
        self._undecided: dict[str, int] = {}
        """Groups that the trainer has neither trained nor discarded, with the step at their start."""
        self._changed = anyio.Event()
        self._over = False
        self.result = LoopResult()

    # -- playing ---------------------------------------------------------------------------------------------------

    async def _attempt(
        self, task: Task, progress: Progress, group: str, at: int, size: int, pinned: str
    ) -> None:
        """Play one attempt, whose slot is taken. With a pinned version, it is an evaluation and never trained on."""
        opened: Trajectory | None = None
        try:
            described = self._describe(task) if self._describe else ""
            async with self._client.trajectory(
                self._model, id=f"{group}-{at}", group=group, group_size=size, attempt=at + 1, task=described,
                split="val" if pinned else "train", pinned=pinned,
            ) as opened:  # fmt: skip
                reward = await call_rollout(self._rollout, opened, task, self._limiter)
                if reward is not None:
                    opened.reward = reward
        except JourneyworkError:
            raise
        except Exception as error:
            self.result.exceptions.append(error)
            if len(self.result.exceptions) > self._max_exceptions:
                raise TooManyExceptionsError(
                    self.result.exceptions, self.result.played, self._max_exceptions
                ) from error
        else:
            self.result.played += 1
            if opened.outcome != "no_result":
                progress.missing -= 1
                if opened.reward is not None:
                    progress.rewards.append(float(opened.reward))
        finally:
            self._slots.release()

    async def play(self, label: str, task: Task, progress: Progress, pinned: str = "") -> None:
        """Play the missing attempts, and those without a result again until `tries` groups were started."""
        while progress.missing and progress.tries < self._tries:
            group, size = self.attempts.group(label, progress.tries), progress.missing
            progress.tries += 1
            async with anyio.create_task_group() as playing, self._turn:
                for at in range(size):
                    await self._slots.acquire()
                    if not at and not pinned:
                        self._undecided[group] = self.result.step
                    playing.start_soon(self._attempt, task, progress, group, at, size, pinned)

    async def evaluate(self, step: int, tasks: Sequence[Task]) -> None:
        """Play the held-out tasks with the version of `step`, as far as they were not played before."""
        means: list[float] = []

        async def one(number: int, task: Task) -> None:
            label = f"eval-{step}-{number}"
            progress = await self.attempts.progress(label, number, 1)
            await self.play(label, task, progress, pinned=f"{self._model}@{step}")
            means.extend(progress.rewards)

        async with anyio.create_task_group() as playing:
            for number, task in enumerate(tasks):
                playing.start_soon(one, number, task)
        self.result.evaluations[step] = mean_of_share(means)

    # -- keeping pace ----------------------------------------------------------------------------------------------

    async def served_step(self) -> int:
        for entry in await self._client.policies():
            if entry["model"] == self._model:
                return int(entry["step"])
        raise ValueError(f"the gateway does not serve the model {self._model!r}")

    async def _decided(self) -> dict[str, dict[str, Any]]:
        """Return the groups that were trained or discarded since the last call, as the gateway describes them."""
        found: dict[str, dict[str, Any]] = {}

        async def read(group: str) -> None:
            state = await self._client.group(group, self._model)
            if state["status"] != "waiting":
                found[group] = state

        async with anyio.create_task_group() as reading:
            for group in list(self._undecided):
                reading.start_soon(read, group)
        return found

    async def watch(self) -> None:
        """Read the served step and the fate of groups, every `poll_s` seconds."""
        while True:
            step = await self.served_step()
            if step != self.result.step or len(self._undecided) >= self._ahead:
                decided = await self._decided()
                # A group that begins from now on begins with this step or a newer one.
                step = await self.served_step()
                for group, state in decided.items():
                    started = self._undecided.pop(group)
                    if state["status"] == "trained":
                        trained = int(state["version"].rpartition("@")[2])
                        self.result.staleness.append(trained - 1 - started)
            self.result.step = step
            self._notify()
            await anyio.sleep(self._poll_s)

    def begin(self, progress: Progress) -> None:
        """Count a group that is about to start."""
        self._undecided[self.attempts.group(str(progress.number), progress.tries)] = self.result.step

    def end(self) -> None:
        """No group will start any more."""
        self._over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def may_start(self) -> bool:
        """Wait until another group keeps to the staleness. Returns whether there are steps left."""
        while self.result.step < self._steps and len(self._undecided) >= self._ahead:
            await self._changed.wait()
        return self.result.step < self._steps

    async def evaluations(self, every: int, tasks: Sequence[Task]) -> None:
        """Evaluate the newest multiple of `every` whenever there is a new one."""
        last = -1
        while True:
            due = self.result.step - self.result.step % every
            if due > last:
                last = due
                try:
                    await self.evaluate(due, tasks)
                except* JourneyworkError as refused:
                    if refused.subgroup(lambda e: isinstance(e, JourneyworkError) and e.status != NOT_FOUND):
                        raise
                    self.result.not_evaluated.append(due)
            elif self._over:
                return
            else:
                await self._changed.wait()


def _check_name(name: str) -> None:
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise ValueError(
            f"the loop's name must have 1 to {_MAX_NAME} printable characters, not {name[: _MAX_NAME + 1]!r}"
        )


async def loop(
    client: LoopClient,
    model: str,
    scenarios: Sequence[Task] | Curriculum[Task],
    rollout: Rollout[Task],
    *,
    name: str,
    steps: int,
    groups_per_step: int,
    group_size: int = 8,
    concurrency: int = 64,
    max_staleness: int = 2,
    epochs: int | None = None,
    evaluate_every: int = 0,
    evaluation: Sequence[Task] = (),
    tries: int = 3,
    max_exceptions: int = 100,
    describe: Callable[[Task], str] | None = None,
    poll_s: float = 0.5,
) -> LoopResult:
    """Play groups of attempts at the scenarios, in order and again from the start, until the gateway serves `steps`.

    The `n`-th group is of scenario `n` modulo their number, or of the task that a `Curriculum` chooses; that one needs
    `describe` to return its keys. `epochs` ends the loop after so many passes over the scenarios. `name` names this
    loop on the log: to continue it, call it again with the same name, scenarios and `group_size`; only one process at a
    time may run it. `groups_per_step`: the trainer's setting of that name. A group starts only if the trainer can train
    it at most `max_staleness` steps after the version with which it begins.
    Every `evaluate_every` steps, from the first version served, the tasks of `evaluation` are played once with that
    version. `tries` is how many groups a scenario may get until each attempt has a result. `rollout` is as for
    `gather`; after more than `max_exceptions` exceptions of rollouts, `TooManyExceptionsError` ends the loop. `poll_s`
    is how often the gateway is asked for its step, in seconds.

    Raises `JourneyworkError` if the gateway refuses a request or stays away, and `TooManyExceptionsError`. Raises
    `ValueError` for a value out of range (a name that is empty, too long or not printable, `group_size` below 2,
    another number below 1, `max_staleness` or `evaluate_every` below 0), for `evaluate_every` without `evaluation`, and
    for a loop that was begun under this name with another model, group size or, if `describe` is given, other
    scenarios."""
    _check_name(name)
    if group_size < 2:
        raise ValueError(
            f"group_size must be at least 2, not {group_size}: rewards are compared within a group"
        )
    if (
        min(steps, groups_per_step, concurrency, tries, 1 if epochs is None else epochs) < 1
        or min(max_staleness, evaluate_every) < 0
    ):
        raise ValueError(
            "steps, groups_per_step, concurrency, tries and epochs must be at least 1, max_staleness and "
            "evaluate_every at least 0"
        )
    if evaluate_every and not evaluation:
        raise ValueError(
            f"evaluate_every is {evaluate_every}, but `evaluation` is empty: give it the held-out tasks"
        )
    curriculum = scenarios if isinstance(scenarios, Curriculum) else None
    if curriculum is not None and (epochs is not None or describe is None):
        raise ValueError("with a curriculum, `describe` must return a task's key, and there are no epochs")
    listed: Sequence[Task] = () if isinstance(scenarios, Curriculum) else scenarios
    if curriculum is None and not listed:
        raise ValueError("there are no scenarios")
    total = None if epochs is None else epochs * len(listed)
    running = _Loop(
        client,
        model,
        rollout,
        name=name,
        steps=steps,
        groups_per_step=groups_per_step,
        group_size=group_size,
        concurrency=concurrency,
        max_staleness=max_staleness,
        tries=tries,
        max_exceptions=max_exceptions,
        describe=describe,
        poll_s=poll_s,
    )
    result = running.result
    with plain_errors(Exception):
        known = await running.attempts.resume(total)
    result.resumed = sum(group_size - progress.missing for progress in known)
    result.step = await running.served_step()

    def task_of(progress: Progress) -> Task:
        if curriculum is None:
            return listed[progress.number % len(listed)]
        return curriculum.task(progress.task) if progress.task else curriculum.next()

    def rest() -> Iterator[Progress]:
        yield from (progress for progress in known if progress.missing and progress.tries < tries)
        number = len(known)
        while total is None or number < total:
            yield Progress(number, group_size)
            number += 1

    async def one(progress: Progress, task: Task) -> None:
        before = len(progress.rewards)
        await running.play(str(progress.number), task, progress)
        if curriculum is not None:
            curriculum.record(task, progress.rewards[before:], result.step)
        if progress.missing:
            result.incomplete.append(progress.number)

    if curriculum is None and describe is not None:
        for progress in known:
            if progress.task and progress.task != describe(task_of(progress)):
                raise ValueError(
                    f"scenario {progress.number} was {progress.task!r} when the loop {name!r} began, and is "
                    f"{describe(task_of(progress))!r} now: give a loop over other scenarios another name"
                )
    if curriculum is not None:
        curriculum.restore(
            Recorded(progress.task, result.step, r) for progress in known for r in progress.rewards
        )
    result.incomplete += [
        progress.number for progress in known if progress.missing and progress.tries >= tries
    ]
    with plain_errors(JourneyworkError, TooManyExceptionsError, ValueError):
        async with anyio.create_task_group() as watching:
            watching.start_soon(running.watch)
            async with anyio.create_task_group() as evaluating:
                if evaluate_every:
                    evaluating.start_soon(running.evaluations, evaluate_every, evaluation)
                async with anyio.create_task_group() as playing:
                    for progress in rest():
                        if not await running.may_start():
                            break
                        running.begin(progress)
                        playing.start_soon(one, progress, task_of(progress))
                running.end()
            watching.cancel_scope.cancel()
    return result
