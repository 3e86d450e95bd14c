"""Counts what is played at a time, and shows its progress."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice

from journeywork.art.types import MessagesAndChoices


class Played(Protocol):
    """The part of a trajectory that is counted."""

    reward: float
    metrics: dict[str, float | int | bool]
    messages_and_choices: MessagesAndChoices


@dataclass
class GatherContext:
    """The trajectories and exceptions of one call of `gather_trajectories` or `gather_trajectory_groups`."""

    pbar: Any = None
    """tqdm's progress bar, or `None`."""
    metric_sums: Counter[str] = field(default_factory=Counter)
    """Of rewards and metrics, by name. `exceptions` is the number of exceptions, as in ART. A trajectory's metric that
    is called `exceptions` or `reward` is counted as `metrics/<name>`: ART adds it to the other value of that name."""
    metric_divisors: Counter[str] = field(default_factory=Counter)
    max_metrics: int | None = None
    """How many metrics the bar shows."""
    max_exceptions: int | float = 0
    """How many exceptions are allowed, or below 1 their share of the bar's total."""
    increment_pbar: bool = True
    pbar_total_completion_tokens: bool = False
    """Has no effect, as in ART."""

    def update_pbar(self, n: int) -> None:
        """Move the bar by `n`, unless `increment_pbar` is off, and show the first `max_metrics` metrics: their means,
        but of `exceptions`, which has no divisor, the count."""
        if self.pbar is None:
            return
        if self.increment_pbar:
            self.pbar.update(n)
        names = list(self.metric_sums)[: self.max_metrics]
        self.pbar.set_postfix(
            {name: self.metric_sums[name] / max(1, self.metric_divisors[name]) for name in names}
        )

    def too_many_exceptions(self) -> bool:
        """Whether there were more exceptions than are allowed."""
        share = 0 < self.max_exceptions < 1 and self.pbar is not None
        allowed = round(self.max_exceptions * self.pbar.total, 6) if share else self.max_exceptions
        return self.metric_sums["exceptions"] > allowed  # rounded: 0.29 * 100 is 28.999999999999996

    def allow(self) -> bool:
        """Count an exception. Returns whether so many are allowed."""
        self.metric_sums["exceptions"] += 1
        self.update_pbar(0)
        return not self.too_many_exceptions()

    def count(self, *trajectories: Played, n: int = 1) -> None:
        """Count trajectories that were played, and move the bar by `n`."""
        for trajectory in trajectories:
            record_metrics(self, trajectory)
        self.update_pbar(n)

    def reset(self) -> None:
        """Begin anew, without a bar and without allowed exceptions."""
        self.__init__(max_metrics=self.max_metrics, increment_pbar=self.increment_pbar)  # type: ignore[misc]


gather_context_var: contextvars.ContextVar[GatherContext] = contextvars.ContextVar("gather_context")


def get_gather_context() -> GatherContext:
    """Return the context that the running task belongs to: one that allows no exceptions outside of any."""
    return gather_context_var.get(GatherContext())


@contextmanager
def set_gather_context(context: GatherContext) -> Iterator[None]:
    """Make `context` the current one within the block, also for tasks that are started in it."""
    token = gather_context_var.set(context)
    try:
        yield
    finally:
        gather_context_var.reset(token)


@contextmanager
def gathering(
    total: int, label: str | None, max_exceptions: float, max_metrics: int | None = None
) -> Iterator[GatherContext]:
    """Make a context with a bar of its own the current one within the block. `label` names the bar, which is shown on
    a terminal only; `None` shows none."""
    from tqdm.auto import tqdm

    bar = tqdm(desc=label, total=total, disable=True if label is None else None)
    context = GatherContext(bar, max_metrics=max_metrics, max_exceptions=max_exceptions)
    with set_gather_context(context):
        try:
            yield context
        finally:
            bar.close()


def record_metrics(context: GatherContext, trajectory: Played) -> None:
    """Add a trajectory's reward and metrics to the means. Its metric `completion_tokens` becomes the mean number of
    sampled tokens of its choices, where they carry logprobs."""
    choices = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
    tokens = [len(c.logprobs.content or c.logprobs.refusal or ()) for c in choices if c.logprobs is not None]
    if tokens:
        trajectory.metrics["completion_tokens"] = sum(tokens) / len(tokens)
    metrics = {
        f"metrics/{name}" if name in ("reward", "exceptions") else name: value
        for name, value in trajectory.metrics.items()
    }
    for name, value in {"reward": trajectory.reward, **metrics}.items():
        context.metric_sums[name] += value  # type: ignore[assignment]  # a Counter of floats
        context.metric_divisors[name] += 1
