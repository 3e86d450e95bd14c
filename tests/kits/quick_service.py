"""A service as a process of its own, to which the log gives soon what a killed process held.

    python -m tests.kits.quick_service ACK_WAIT_S MODULE [ARGUMENT …]

It runs `python -m MODULE ARGUMENT …` with consumers whose acknowledgement time is `ACK_WAIT_S` seconds instead of ten.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys

from pipeline import streams

ACK_WAIT_S = 2.0
"""Long enough that a busy machine keeps alive what a process holds, which it does three times in this time."""


def quick_consumers(
    ack_wait_s: float = ACK_WAIT_S, *, endless: bool = False
) -> tuple[streams.ConsumerSpec, ...]:
    """Return the consumers with another acknowledgement time. The test's own broker must provision the same.

    `endless`: no number of redeliveries and deaths makes a dead letter."""
    if not endless:
        return tuple(dataclasses.replace(c, ack_wait_s=ack_wait_s) for c in streams.CONSUMERS)
    most = 1_000_000
    return tuple(
        dataclasses.replace(c, ack_wait_s=ack_wait_s, max_deliver=most, max_deaths=c.max_deaths and most)
        for c in streams.CONSUMERS
    )


def command(module: str, *args: str) -> list[str]:
    """Return the command that runs a service in such a process."""
    return [sys.executable, "-m", "tests.kits.quick_service", str(ACK_WAIT_S), module, *args]


if __name__ == "__main__":
    _, ack_wait, module, *arguments = sys.argv
    streams.CONSUMERS = quick_consumers(float(ack_wait))
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
