"""Consumers to which the log gives soon what a killed process held."""

import dataclasses

from pipeline import streams

ACK_WAIT_S = 2.0
"""Long enough that a busy machine keeps alive what a process holds, which it does three times in this time."""


def quick_consumers(ack_wait_s: float = ACK_WAIT_S, *, endless: bool = False) -> tuple[streams.ConsumerSpec, ...]:
    """Return the consumers with another acknowledgement time. The test's own broker must provision the same.

    `endless`: no number of redeliveries and deaths makes a dead letter."""
    if not endless:
        return tuple(dataclasses.replace(c, ack_wait_s=ack_wait_s) for c in streams.CONSUMERS)
    most = 1_000_000
    return tuple(
        dataclasses.replace(c, ack_wait_s=ack_wait_s, max_deliver=most, max_deaths=c.max_deaths and most)
        for c in streams.CONSUMERS
    )
