"""Crash points: places in the code where a test can kill the process.

    JOURNEYWORK_CRASH="store.after_commit:3" python -m store …     # dies when it reaches the point for the third time

Without the variable, `point` does nothing. With it, the process gets SIGKILL: no `finally` block runs and nothing is
flushed. A point is a call `crash.point("<service>.<moment>")` between two effects that a death must not tear apart; the
crash tests find all of them in the source (`tests/kits/crash/points.py`).
"""

from __future__ import annotations

import os
import signal

VARIABLE = "JOURNEYWORK_CRASH"

_name, _left = "", 0
"""The armed point, empty if there is none, and how often the process may still reach it; the last time ends it."""


def point(name: str) -> None:
    """Kill the process if `name` is the armed point and its count is reached. Call it as `crash.point`."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)


def arm(where: str) -> None:
    """Arm a point: `"name:count"` kills the process when it reaches the point for the count-th time; an empty text
    disarms."""
    global _name, _left
    _name, _, count = where.partition(":")
    _left = int(count or 1)


arm(os.environ.get(VARIABLE, ""))
