"""What the gateway has of a loop (`journeywork.looping`): which attempts at which scenarios are complete.

A loop that is started again asks here what is left to play; nothing of it is kept on this machine. A *scenario* is a
task of the loop, and an *attempt* one run of it. Each scenario has a *group* of attempts, whose rewards are compared,
and a further group for the attempts that ended without a result; each group is a *try*, and their number is limited. An
attempt's id follows from the loop's name and its place: `<loop>-<scenario>[.<try>]-<attempt>`, and at a held-out task,
which the version of a step is evaluated by, `<loop>-eval-<step>-<task>[.<try>]-<attempt>`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from journeywork.client import AsyncJourneywork
from journeywork.transport import CONFLICT, NOT_FOUND, JourneyworkError

Item = TypeVar("Item")
Result = TypeVar("Result")
_READS = 16
"""Trajectories that are read at the same time."""
_SCENARIOS_AT_ONCE = 128
"""Scenarios that are read together. If none of so many in a row was started, no later one was."""


async def run_all(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """Return `await work(item)` of each item, all at once, in the order of `items`. Raises as a task group does."""
    results: dict[int, Result] = {}

    async def run(at: int, item: Item) -> None:
        results[at] = await work(item)

    async with anyio.create_task_group() as running:
        for at, item in enumerate(items):
            running.start_soon(run, at, item)
    return [results[at] for at in range(len(results))]


@dataclass
class Progress:
    """The attempts at one scenario, or at one held-out task with one version, as the log has them."""

    number: int
    """The scenario's place in the loop, or the held-out task's in `LoopOptions.evaluation`."""
    missing: int
    """Attempts that have no result yet."""
    evaluated_step: int | None = None
    """The step of the version that plays a held-out task. `None` for a scenario, which is trained."""
    tries: int = 0
    """Groups of attempts that were started."""
    rewards: list[float] = field(default_factory=list)
    task: str = ""
    """The text that `describe` gave to the scenario."""


class Attempts:
    """Reads the attempts of the loop `name` with `model`. A scenario has `size` attempts in at most `tries` groups;
    `concurrency` of the loop's attempts are under way at most."""

    def __init__(
        self, client: AsyncJourneywork, model: str, *, name: str, size: int, tries: int, concurrency: int
    ) -> None:
        self._client, self._model = client, model
        self._name, self._size, self._tries = name, size, tries
        self._reads = anyio.Semaphore(_READS)
        self._scenarios_at_once = max(_SCENARIOS_AT_ONCE, concurrency)

    def group_name(self, progress: Progress, try_number: int) -> str:
        """Return the name of a group of attempts at a scenario or held-out task: the first one (`try_number` 0), or one
        for a further try."""
        label = "" if progress.evaluated_step is None else f"eval-{progress.evaluated_step}-"
        return f"{self._name}-{label}{progress.number}" + (f".{try_number}" if try_number else "")

    async def _recorded(self, trajectory: str) -> dict[str, Any] | None:
        """Return an attempt as the gateway describes it; `None` if it was never opened."""
        try:
            async with self._reads:
                return await self._client.get(trajectory)
        except JourneyworkError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _read_ended(self, trajectory: str) -> dict[str, Any] | None:
        """Return an attempt as `_recorded` does. One that is open is completed without a result first: one process at a
        time runs a loop, so the process that opened the attempt has died."""
        state = await self._recorded(trajectory)
        if state is not None and state["status"] == "open":
            try:
                await self._client.complete(trajectory, outcome="no_result")
            except JourneyworkError as error:
                if error.status != CONFLICT:  # it was completed meanwhile
                    raise
            return await self._recorded(trajectory)
        return state

    async def read(self, progress: Progress) -> Progress:
        """Update `progress`, in which all attempts are missing, with those that the gateway has, and return it. Open
        attempts are completed without a result (`_read_ended`). Raises `ValueError` if they were begun with another
        model, or in a group of another size."""
        size = progress.missing
        while progress.missing and progress.tries < self._tries:
            group = self.group_name(progress, progress.tries)
            states = await run_all(self._read_ended, [f"{group}-{at}" for at in range(progress.missing)])
            opened = [state for state in states if state is not None]
            if not opened:
                break
            # A further try has as many attempts as the tries before it left without a result.
            self._check_same_loop(opened[0], 0 if progress.tries else size)
            done = [state for state in opened if state["outcome"] != "no_result"]
            progress.rewards += [state["reward"] for state in done if state["reward"] is not None]
            progress.missing -= len(done)
            progress.tries += 1
            progress.task = opened[0]["task"]
        return progress

    def _check_same_loop(self, state: dict[str, Any], size: int) -> None:
        """Raise `ValueError` if an attempt was begun with another model, or in a group of another size (0: any)."""
        for option, wanted in (("model", self._model), ("group_size", size)):
            if wanted and state[option] != wanted:
                raise ValueError(
                    f"the loop {self._name!r} was started with {option}={state[option]!r} and can't continue with "
                    f"{wanted!r}: use another name, or the {option} that it was started with"
                )

    async def resume(self, scenarios: int | None) -> list[Progress]:
        """Return the progress of every scenario that was started. `scenarios`: their number; `None`: no end.

        Scenarios are started in their order and at most `concurrency` of them overlap, so reading ends where none of
        `_scenarios_at_once` in a row was started."""
        known: list[Progress] = []
        start = 0
        while scenarios is None or start < scenarios:
            end = start + self._scenarios_at_once
            end = end if scenarios is None else min(end, scenarios)
            read = await run_all(self.read, [Progress(number, self._size) for number in range(start, end)])
            if not any(progress.tries for progress in read):
                break
            known += read
            start = end
        while known and not known[-1].tries:
            known.pop()
        return known
