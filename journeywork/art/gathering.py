"""Counts what a call of `gather_trajectories` or `gather_trajectory_groups` has played, and shows its progress."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice

from journeywork.art.types import MessagesAndChoices

_current: contextvars.ContextVar[Gathering | None] = contextvars.ContextVar("gathering", default=None)


class Played(Protocol):
    """The part of a trajectory that is counted."""

    reward: float
    metrics: dict[str, float | int | bool]
    messages_and_choices: MessagesAndChoices


class Gathering:
    """The trajectories and exceptions of one call."""

    def __init__(
        self, total: int, label: str | None, *, max_exceptions: float, max_metrics: int | None, tokens: bool
    ) -> None:
        """`max_exceptions` is a count, or a share of `total` below 1. `label` names the progress bar; `None` shows
        none."""
        self._allowed = max_exceptions * total if 0 < max_exceptions < 1 else max_exceptions
        self._exceptions, self._max_metrics, self._tokens = 0, max_metrics, tokens
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._bar: Any = None
        if label is not None:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=label, total=total, disable=None)

    def allow(self, error: Exception) -> bool:
        """Count an exception. Returns whether so many are allowed."""
        self._exceptions += 1
        self._show()
        return self._exceptions <= self._allowed

    def count(self, trajectory: Played) -> None:
        """Count a trajectory that was played."""
        self.add_metrics(trajectory)
        self.advance()

    def advance(self) -> None:
        """Move the progress bar by one."""
        if self._bar is not None:
            self._bar.update(1)
        self._show()

    def add_metrics(self, trajectory: Played) -> None:
        """Add a trajectory to the means that the progress bar shows."""
        metrics = {"reward": trajectory.reward, **trajectory.metrics}
        if self._tokens:
            metrics["completion_tokens"] = completion_tokens(trajectory)
        for name, value in metrics.items():
            self._sums[name] += value  # type: ignore[assignment]  # a Counter of floats
            self._counts[name] += 1

    def _show(self) -> None:
        if self._bar is None:
            return
        names = list(self._sums)[: self._max_metrics]
        shown = {name: self._sums[name] / self._counts[name] for name in names}
        if self._exceptions:
            shown["exceptions"] = self._exceptions
        self._bar.set_postfix(shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def completion_tokens(trajectory: Played) -> int:
    """Return the number of sampled tokens in the choices that carry logprobs."""
    choices = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
    return sum(len(c.logprobs.content or ()) for c in choices if c.logprobs is not None)


def current_gathering() -> Gathering | None:
    """Return the gathering that the running task belongs to, or `None`."""
    return _current.get()


@contextmanager
def as_current(gathering: Gathering) -> Iterator[None]:
    """Make `gathering` the current one within the block, also for tasks that are started in it."""
    token = _current.set(gathering)
    try:
        yield
    finally:
        _current.reset(token)
        gathering.close()
