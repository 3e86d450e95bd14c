"""Whether sampler, trainer or agents bound the speed of training, for `journeywork status` and the dashboard: by the
shares of time in which the inference servers answered calls, and in which the trainer trained."""

from __future__ import annotations

from collections.abc import Iterable

BUSY = 0.9
"""Share of time from which on the busier one of sampler and trainer is what bounds the speed."""


def busy_share(spans: Iterable[tuple[int, int]], begin: int, end: int) -> float:
    """Return the share of the time from `begin` to `end` that at least one of `spans` (begin, end) covers."""
    covered, covered_until = 0, begin
    for first, last in sorted(spans):
        covered += max(0, min(last, end) - max(first, covered_until))
        covered_until = max(covered_until, last)
    return covered / (end - begin) if end > begin else 0.0


def bound_by(sampling: float, training: float) -> str:
    """Return what bounds the speed: `sampling` or `training`, whichever is busier, or `agents` where neither is busy
    for `BUSY` of the time: then both wait for agents, tools or the judge."""
    if max(sampling, training) < BUSY:
        return "agents"
    return "sampling" if sampling >= training else "training"
