"""Whether sampler, trainer or agents bound the speed of training, for `journeywork status` and the dashboard: by the
shares of time in which the inference servers answered calls, and in which the trainer trained."""

from __future__ import annotations

BUSY = 0.9
"""Share of time from which on the busier one of sampler and trainer is what bounds the speed."""


def bound_by(sampling: float, training: float) -> str:
    """Return what bounds the speed: `sampling` or `training`, whichever is busier, or `agents` where neither is busy
    for `BUSY` of the time: then both wait for agents, tools or the judge."""
    if max(sampling, training) < BUSY:
        return "agents"
    return "sampling" if sampling >= training else "training"
