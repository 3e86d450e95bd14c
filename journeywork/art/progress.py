"""Counts what one call of `gather_trajectories` or `gather_trajectory_groups` plays, and shows its progress.

The call makes a `GatherContext` the current one of its tasks (a context variable). What they play (`gather`,
`trajectories`) is counted there, and each exception asks it whether so many are allowed. Programs use the class and its
functions by ART's names."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat.chat_completion import Choice


@dataclass
class GatherContext:
    """The trajectories and exceptions of one call of `gather_trajectories` or `gather_trajectory_groups`."""

    pbar: Any = None
    """tqdm's progress bar, or `None`."""
    max_exceptions: int | float = 0
    """How many exceptions are allowed, or below 1 their share of the bar's total."""
    pbar_total_completion_tokens: bool = False
    """Has no effect, as in ART."""
    exceptions: int = 0
    """How many there were."""
    sums: Counter[str] = field(default_factory=Counter)
    """Of rewards and metrics, by name."""
    numbers: Counter[str] = field(default_factory=Counter)
    """Of the values in `sums`."""

    def show(self, n: int) -> None:
        """Move the bar by `n`, and show the means of the metrics, and the number of exceptions."""
        if self.pbar is not None:
            self.pbar.update(n)
            means = {name: total / self.numbers[name] for name, total in self.sums.items()}
            self.pbar.set_postfix(means | {"exceptions": self.exceptions})

    def allow(self) -> bool:
        """Count an exception. Returns whether so many are allowed."""
        self.exceptions += 1
        self.show(0)
        share = 0 < self.max_exceptions < 1 and self.pbar is not None
        allowed = round(self.max_exceptions * self.pbar.total, 6) if share else self.max_exceptions
        return self.exceptions <= allowed  # rounded: 0.29 * 100 is 28.999999999999996

    def count(self, *trajectories: Any, n: int = 1) -> None:
        """Add the rewards and metrics of trajectories that were played to the means, and move the bar by `n`. The
        metric `completion_tokens` becomes the mean number of sampled tokens of a trajectory's choices, where they carry
        logprobs."""
        for trajectory in trajectories:
            choices = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
            logprobs_of = [choice.logprobs for choice in choices if choice.logprobs is not None]
            if logprobs_of:
                tokens = sum(len(logprobs.content or logprobs.refusal or ()) for logprobs in logprobs_of)
                trajectory.metrics["completion_tokens"] = tokens / len(logprobs_of)
            for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
                self.sums[name] += value
                self.numbers[name] += 1
        self.show(n)


_context: contextvars.ContextVar[GatherContext] = contextvars.ContextVar("gather_context")


def get_gather_context() -> GatherContext:
    """Return the context that the running task belongs to: one that allows no exceptions outside of any."""
    return _context.get(GatherContext())


@contextmanager
def set_gather_context(context: GatherContext) -> Iterator[None]:
    """Make `context` the current one within the block, also for tasks that are started in it."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def gathering(total: int, label: str | None, max_exceptions: float) -> Iterator[GatherContext]:
    """Make a context with a bar of its own the current one within the block. `label` names the bar, which is shown on
    a terminal only; `None` shows none."""
    from tqdm.auto import tqdm

    bar = tqdm(desc=label, total=total, disable=True if label is None else None)
    context = GatherContext(bar, max_exceptions=max_exceptions)
    with set_gather_context(context):
        try:
            yield context
        finally:
            bar.close()
