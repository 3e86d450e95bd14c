"""What the gateway has of a loop: which attempts at which scenarios are complete.

An attempt's id follows from the loop's name and its place. Each scenario has a group of attempts, and one more for
those attempts that ended without a result, up to a number of tries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from journeywork.transport import CONFLICT, NOT_FOUND, JourneyworkError

if TYPE_CHECKING:
    from journeywork.client import AsyncJourneywork

Item = TypeVar("Item")
Result = TypeVar("Result")
_READS = 16
"""Trajectories that are read at the same time."""
_STRETCH = 128
"""So many scenarios in a row that were never started mean that no later one was."""


async def together(work: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
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
    """The attempts at one scenario, or one held-out task, as the log has them."""

    number: int
    missing: int
    tries: int = 0
    """Groups of attempts that were started."""
    rewards: list[float] = field(default_factory=list)
    task: str = ""
    """The text that `describe` gave to the scenario."""


class Attempts:
    """The attempts of the loop `name` with `model`. A scenario has `size` of them; `concurrency` are under way at
    most."""

    def __init__(
        self, client: AsyncJourneywork, model: str, *, name: str, size: int, tries: int, concurrency: int
    ) -> None:
        self._client, self._model = client, model
        self._name, self._size, self._tries = name, size, tries
        self._reads = anyio.Semaphore(_READS)
        self._stretch = max(_STRETCH, concurrency)

    def group(self, label: str, tried: int) -> str:
        """Return the name of a group: the first of a scenario (`label` is its number), or one for a further try."""
        return f"{self._name}-{label}" + (f".{tried}" if tried else "")

    async def _recorded(self, trajectory: str) -> dict[str, Any] | None:
        try:
            async with self._reads:
                return await self._client.get(trajectory)
        except JourneyworkError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _settled(self, trajectory: str) -> dict[str, Any] | None:
        """Return an attempt as recorded, once it is complete. An open one has lost its process: it gets no result."""
        state = await self._recorded(trajectory)
        if state is not None and state["status"] == "open":
            try:
                await self._client.complete(trajectory, outcome="no_result")
            except JourneyworkError as error:
                if error.status != CONFLICT:
                    raise
            return await self._recorded(trajectory)
        return state

    async def progress(self, label: str, number: int, size: int) -> Progress:
        """Read the attempts at a scenario (`label` is its number) or at a held-out task from the gateway.

        Raises `ValueError` if they were begun with another model or in a group of another size."""
        progress = Progress(number, size)
        while progress.missing and progress.tries < self._tries:
            group = self.group(label, progress.tries)
            states = await together(self._settled, [f"{group}-{at}" for at in range(progress.missing)])
            opened = [state for state in states if state is not None]
            if not opened:
                break
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
        """Return the progress of every scenario that was started. Scenarios are started in their order, so reading ends
        after a stretch, longer than what is ever under way, in which none was."""
        known: list[Progress] = []
        start = 0
        while scenarios is None or start < scenarios:
            end = start + self._stretch if scenarios is None else min(start + self._stretch, scenarios)
            stretch = await together(lambda number: self.progress(str(number), number, self._size), range(start, end))
            if not any(progress.tries for progress in stretch):
                break
            known += stretch
            start = end
        while known and not known[-1].tries:
            known.pop()
        return known
