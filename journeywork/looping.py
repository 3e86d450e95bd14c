"""Play scenarios while the trainer trains: bounded staleness, evaluation every few steps, and a resume from the log.

    async with AsyncJourneywork(url) as client:
        options = LoopOptions("night-1", steps=100, groups_per_step=16, evaluate_every=10, evaluation=held_out)
        result = await loop(client, "support", scenarios, play, options)

Every attempt has an id that follows from the loop's name and its place: `<name>-<scenario>-<attempt>`. A loop that is
started again under its name asks the gateway which attempts were completed and plays the rest. Nothing is kept on this
machine. An attempt whose process died is completed as `no_result` and played again in a group of its own; so is an
attempt whose rollout raised.

A group is *decided* when the trainer has trained or discarded it. So that no group gets older than `max_staleness`
steps, only so many may be undecided at a time as the trainer trains in that many steps; others wait
(`_Loop.may_start`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import anyio

from journeywork.attempts import Attempts, Progress, run_all
from journeywork.client import AsyncJourneywork
from journeywork.gathering import Rollout, Task, TooManyExceptionsError, call_rollout
from journeywork.statistics import Estimate, mean_of
from journeywork.trajectory import Trajectory
from journeywork.transport import NOT_FOUND, JourneyworkError, plain_errors

_READS = 16
"""Groups that are read at the same time."""
_MAX_NAME = 150
"""Characters of a loop's name. The gateway takes 200 for an id, which also holds the attempt's place."""


@dataclass(frozen=True)
class LoopOptions(Generic[Task]):
    """What a loop does beside playing. Raises `ValueError` for a value out of range, and for `evaluate_every` without
    `evaluation`."""

    name: str
    """Names the loop on the log: 1 to 150 printable characters. To continue it, start it again with the same name,
    scenarios and `group_size`; only one process at a time may run it."""
    steps: int
    """It ends when the gateway serves this step."""
    groups_per_step: int
    """The trainer's setting of that name."""
    group_size: int = 8
    """Attempts of a group, 2 or more."""
    concurrency: int = 64
    """Attempts under way at the same time."""
    max_staleness: int = 2
    """A group starts only if the trainer can train it at most so many steps after the version with which it begins."""
    epochs: int | None = None
    """It ends after so many passes over the scenarios."""
    evaluate_every: int = 0
    """The tasks of `evaluation` are played once with each version whose step is a multiple of this. At its start, the
    loop takes the newest such version."""
    evaluation: Sequence[Task] = ()
    tries: int = 3
    """Groups that a scenario may get until each attempt has a result."""
    max_exceptions: int = 100
    """After more exceptions of rollouts, `TooManyExceptionsError` ends the loop."""
    describe: Callable[[Task], str] | None = None
    """Returns the text of a scenario for the judge."""
    poll_s: float = 0.5
    """How often the gateway is asked for its step, in seconds."""

    def __post_init__(self) -> None:
        name = self.name
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(
                f"the loop's name must have 1 to {_MAX_NAME} printable characters, not {name[: _MAX_NAME + 1]!r}"
            )
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, not {self.group_size}: rewards are compared within a group"
            )
        for least, names in (
            (1, ("steps", "groups_per_step", "concurrency", "tries", "epochs")),
            (0, ("max_staleness", "evaluate_every")),
        ):
            for field_name in names:
                value = getattr(self, field_name)
                if value is not None and value < least:
                    raise ValueError(f"{field_name} must be at least {least}, not {value}")
        if self.evaluate_every and not self.evaluation:
            raise ValueError(
                f"evaluate_every is {self.evaluate_every}, but `evaluation` is empty: give it the held-out tasks"
            )


@dataclass
class LoopResult:
    """What a loop did since this process started it, but for `resumed` and `incomplete`."""

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
    """Steps whose version the gateway did not have any more when their turn came: retention had removed it."""
    staleness: list[int] = field(default_factory=list)
    """For each trained group that this process started, in how many steps it became older between its start and its
    training."""
    exceptions: list[Exception] = field(default_factory=list)
    """What rollouts raised."""


class _Loop(Generic[Task]):
    """One running loop. `loop` starts `watch`, `evaluations` and a `play` for each group as tasks of one task group."""

    def __init__(
        self,
        client: AsyncJourneywork,
        model: str,
        scenarios: Sequence[Task],
        rollout: Rollout[Task],
        options: LoopOptions[Task],
    ) -> None:
        """Raises `ValueError` if there are no scenarios."""
        if not scenarios:
            raise ValueError("there are no scenarios")
        self._client, self._model, self._scenarios = client, model, scenarios
        self._rollout, self._options = rollout, options
        concurrency = options.concurrency
        self.attempts = Attempts(
            client, model, name=options.name, size=options.group_size, tries=options.tries, concurrency=concurrency
        )
        self.groups = None if options.epochs is None else options.epochs * len(scenarios)
        """Number of groups to play; `None` if there is no end to them."""
        self._most_undecided = (options.max_staleness + 1) * options.groups_per_step
        """Groups that may be under way or waiting to be trained, so that none becomes older than `max_staleness`."""
        self._slots = anyio.Semaphore(concurrency)
        self._limiter = anyio.CapacityLimiter(concurrency)
        self._reads = anyio.Semaphore(_READS)
        self._turn = anyio.Lock()
        """Held while a group takes its slots, so that groups begin in their order and a few at a time."""
        self._undecided: dict[str, int | None] = {}
        """Groups that the trainer has neither trained nor discarded, with the step at their start; `None` where an
        earlier process started them."""
        self._unopened: set[str] = set()
        """Those of which no run was opened yet: the gateway does not know them."""
        self._changed = anyio.Event()
        """Set, and replaced by a new one, when the step or the undecided groups were read, and at the end (`_notify`).
        """
        self._over = False
        """Whether no group will start any more."""
        self.result = LoopResult()

    # -- what is left ----------------------------------------------------------------------------------------------

    def _task_of(self, progress: Progress) -> Task:
        """Return the held-out task, or the scenario: the loop begins again with the first one after the last."""
        if progress.evaluated_step is not None:
            return self._options.evaluation[progress.number]
        return self._scenarios[progress.number % len(self._scenarios)]

    async def resume(self) -> list[Progress]:
        """Return what an earlier process played of this loop. Raises `ValueError` if it was of other scenarios."""
        with plain_errors(Exception):
            known = await self.attempts.resume(self.groups)
        describe = self._options.describe
        for progress in known:
            if describe and progress.task and progress.task != (now := describe(self._task_of(progress))):
                raise ValueError(
                    f"scenario {progress.number} was {progress.task!r} when the loop {self._options.name!r} began, and "
                    f"is {now!r} now: give a loop over other scenarios another name"
                )
            self.result.resumed += self._options.group_size - progress.missing
            if progress.missing and progress.tries >= self._options.tries:
                self.result.incomplete.append(progress.number)
        return known

    def remaining(self, known: Sequence[Progress]) -> Iterator[Progress]:
        """Yield what is left to play: the started scenarios (`known`) that lack attempts, then those after them."""
        for progress in known:
            if progress.missing and progress.tries < self._options.tries:
                yield progress
        numbers = itertools.count(len(known)) if self.groups is None else range(len(known), self.groups)
        for number in numbers:
            yield Progress(number, self._options.group_size)

    # -- playing ---------------------------------------------------------------------------------------------------

    async def _attempt(self, progress: Progress, group: str, at: int, size: int) -> None:
        """Play the attempt `at` (from 0) of a group of `size`, and free the slot that `play` took for it. What the
        rollout raises is kept and counted: the attempt has no result then, and is played again."""
        opened: Trajectory | None = None
        task, is_evaluation = self._task_of(progress), progress.evaluated_step is not None
        try:
            described = self._options.describe(task) if self._options.describe else ""
            async with self._client.trajectory(
                self._model,
                id=f"{group}-{at}",
                group=group,
                group_size=size,
                attempt=at + 1,
                task=described,
                split="val" if is_evaluation else "train",
                pinned=f"{self._model}@{progress.evaluated_step}" if is_evaluation else "",
            ) as opened:
                self._unopened.discard(group)
                await call_rollout(self._rollout, opened, task, self._limiter)
        except JourneyworkError:
            raise
        except Exception as error:
            self.result.exceptions.append(error)
            if len(self.result.exceptions) > self._options.max_exceptions:
                raise TooManyExceptionsError(
                    self.result.exceptions, self.result.played, self._options.max_exceptions
                ) from error
        else:
            self.result.played += 1
            if opened.outcome != "no_result":
                progress.missing -= 1
                if opened.reward is not None:
                    progress.rewards.append(float(opened.reward))
        finally:
            self._slots.release()

    async def play(self, progress: Progress) -> None:
        """Play the missing attempts, and those without a result again until `tries` groups were started."""
        while progress.missing and progress.tries < self._options.tries:
            group, size = self.attempts.group_name(progress, progress.tries), progress.missing
            progress.tries += 1
            async with anyio.create_task_group() as playing, self._turn:
                for at in range(size):
                    await self._slots.acquire()
                    if not at and progress.evaluated_step is None:
                        # `count_next_group` has counted the group, with the step before it waited for its slot.
                        self._count(group)
                    playing.start_soon(self._attempt, progress, group, at, size)
        if progress.missing and progress.evaluated_step is None:
            self.result.incomplete.append(progress.number)

    async def evaluate(self, step: int) -> None:
        """Play the held-out tasks with the version of `step`, as far as they were not played before."""

        async def play_task(number: int) -> list[float]:
            progress = await self.attempts.read(Progress(number, 1, evaluated_step=step))
            await self.play(progress)
            return progress.rewards

        rewards = await run_all(play_task, range(len(self._options.evaluation)))
        self.result.evaluations[step] = mean_of([reward for of_task in rewards for reward in of_task])

    # -- keeping pace ----------------------------------------------------------------------------------------------

    async def served_step(self) -> int:
        """Return the step of the version that the model's name stands for. Raises `ValueError` for an unknown model."""
        for entry in await self._client.policies():
            if entry["model"] == self._model:
                return int(entry["step"])
        raise ValueError(f"the gateway does not serve the model {self._model!r}")

    async def _read_decided(self) -> dict[str, dict[str, Any]]:
        """Return the groups that were trained or discarded since the last call, as the gateway describes them. One that
        it does not know any more has expired and counts as discarded."""

        async def read(group: str) -> dict[str, Any]:
            try:
                async with self._reads:
                    return await self._client.group(group, self._model)
            except JourneyworkError as error:
                if error.status != NOT_FOUND:
                    raise
                return {"status": "discarded"}

        groups = [group for group in self._undecided if group not in self._unopened]
        states = zip(groups, await run_all(read, groups), strict=True)
        return {group: state for group, state in states if state["status"] != "waiting"}

    async def count_earlier_groups(self, known: Sequence[Progress]) -> None:
        """Count the groups of an earlier process that still wait for the trainer: it trains them before new ones."""
        for progress in known:
            self._undecided |= dict.fromkeys(
                self.attempts.group_name(progress, tried) for tried in range(progress.tries)
            )
        for group in await self._read_decided():
            del self._undecided[group]

    async def watch(self) -> None:
        """Read the served step, and which groups were trained or discarded, every `poll_s` seconds until cancelled."""
        while True:
            step = await self.served_step()
            if step != self.result.step or len(self._undecided) >= self._most_undecided:
                decided = await self._read_decided()
                # Read once more, after the decisions and before their groups make room for others: a group that begins
                # from now on begins with this step or a newer one.
                step = await self.served_step()
                for group, state in decided.items():
                    started = self._undecided.pop(group)
                    if state["status"] == "trained" and started is not None:
                        trained = int(state["version"].rpartition("@")[2])
                        self.result.staleness.append(trained - 1 - started)
            self.result.step = step
            self._notify()
            await anyio.sleep(self._options.poll_s)

    def count_next_group(self, progress: Progress) -> None:
        """Count the group that `play` starts next for `progress`, so that `may_start` reckons with it."""
        self._count(self.attempts.group_name(progress, progress.tries))

    def _count(self, group: str) -> None:
        """Count a group as undecided and as not known to the gateway yet, with the present step as that of its
        start."""
        self._undecided[group] = self.result.step
        self._unopened.add(group)

    def end(self) -> None:
        """Note that no group will start any more, so that `evaluations` ends."""
        self._over = True
        self._notify()

    def _notify(self) -> None:
        """Wake `may_start` and `evaluations`, which wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    async def may_start(self) -> bool:
        """Wait until another group keeps within `max_staleness`. Returns whether there are steps left."""
        while self.result.step < self._options.steps and len(self._undecided) >= self._most_undecided:
            await self._changed.wait()
        return self.result.step < self._options.steps

    async def evaluations(self) -> None:
        """Evaluate every multiple of `evaluate_every`, from the newest one at the start on: several may be new at once,
        because an evaluation takes longer than a step."""
        due = self.result.step - self.result.step % self._options.evaluate_every
        while True:
            if due <= self.result.step:
                try:
                    await self.evaluate(due)
                except* JourneyworkError as refused:
                    if refused.subgroup(lambda e: isinstance(e, JourneyworkError) and e.status != NOT_FOUND):
                        raise
                    self.result.not_evaluated.append(due)
                due += self._options.evaluate_every
            elif self._over:
                return
            else:
                await self._changed.wait()


async def loop(
    client: AsyncJourneywork, model: str, scenarios: Sequence[Task], rollout: Rollout[Task], options: LoopOptions[Task]
) -> LoopResult:
    """Play groups of attempts at the scenarios, in order and again from the start, until the gateway serves
    `options.steps`.

    The `n`-th group is of scenario `n` modulo their number. `rollout` is as for `gather`.

    Raises `JourneyworkError` if the gateway refuses a request or stays away, and `TooManyExceptionsError`. Raises
    `ValueError` for no scenarios, and for a loop that was begun under this name with another model, group size or, with
    `describe`, other scenarios."""
    running = _Loop(client, model, scenarios, rollout, options)
    known = await running.resume()
    running.result.step = await running.served_step()
    await running.count_earlier_groups(known)
    with plain_errors(JourneyworkError, TooManyExceptionsError, ValueError):
        async with anyio.create_task_group() as watching:
            watching.start_soon(running.watch)
            async with anyio.create_task_group() as evaluating:
                if options.evaluate_every:
                    evaluating.start_soon(running.evaluations)
                async with anyio.create_task_group() as playing:
                    for progress in running.remaining(known):
                        if not await running.may_start():
                            break
                        running.count_next_group(progress)
                        playing.start_soon(running.play, progress)
                running.end()
            watching.cancel_scope.cancel()
    return running.result
