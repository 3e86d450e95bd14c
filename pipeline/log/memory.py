"""Bounds the memory of the NATS server by deleting the oldest events.

The server holds every subject that has a message in memory, and each run and each group has subjects of its own. So
at a high rate memory, not age, decides how long the log keeps events. `trim` deletes the oldest events of a stream with
more subjects than `nats.max_memory` allows, but none that the judge, the trainer or the store has not read.
"""

from __future__ import annotations

import time

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.streams import MEMORY_SHARES
from pipeline.telemetry.logs import get_logger

logger = get_logger("pipeline.log.memory")

SUBJECT_BYTES = 560
"""Resident bytes of a NATS server for a subject with a message: 492 MB for 880,794 subjects after 28 minutes at 183
calls a second."""
SUBJECTS_OF_RUN = 3
"""Subjects of a run in ROLLOUTS: opened, exchanges, completed."""
_HEADROOM = 0.1
"""Share of the subjects that a deletion makes room for, so that one is not needed at every check."""


def most_subjects(max_memory: int, stream: str) -> int:
    """Return how many subjects of a stream fit into `max_memory` bytes of all streams."""
    return int(max_memory * MEMORY_SHARES[stream] / SUBJECT_BYTES)


def retention(nats: NatsConfig) -> str:
    """Return how long the log keeps runs, as a sentence for the operator."""
    retained = f"the log keeps runs for {nats.rollouts_max_age_h:g} h"
    if not nats.max_memory:
        return f"{retained}, whatever memory its server needs for that (nats.max_memory is not set)"
    runs = most_subjects(nats.max_memory, "ROLLOUTS") // SUBJECTS_OF_RUN
    rate = runs / nats.rollouts_max_age_s
    return (
        f"{retained} at up to {rate:,.1f} runs a second, and for less time at more: the newest {runs:,} runs, in "
        f"{nats.max_memory / 1e9:,.1f} GB of memory (nats.max_memory)"
    )


async def trim(broker: Broker, max_memory: int) -> None:
    """Delete the oldest events of streams with more subjects than fit into `max_memory` bytes, but none that a service
    still has to read. Raises `BrokerError` and nats-py's errors."""
    for name in MEMORY_SHARES:
        state = (await broker.stream_info(name)).state
        most, subjects = most_subjects(max_memory, name), await broker.count_subjects(name)
        if subjects <= most:
            continue
        # The share of messages to delete, if subjects are spread evenly over the stream.
        excess = 1 - (1 - _HEADROOM) * most / subjects
        fitting_seq = state.first_seq + int(excess * (state.last_seq - state.first_seq + 1))
        # Telemetry's consumers begin at the newest event: they may miss some.
        readers = [c for c in streams.CONSUMERS if c.stream == name and c.start == "all"]
        unread = [await broker.first_unread(consumer) for consumer in readers]
        first = min([fitting_seq, *(seq for seq in unread if seq is not None)])
        if first < fitting_seq:
            logger.error(
                "the NATS server needs more memory than nats.max_memory: a consumer is behind, and keeps events",
                stream=name,
                subjects=subjects,
                most=most,
            )
        if first <= state.first_seq:
            continue
        await broker.js.purge_stream(name, seq=first)
        oldest = await broker.next_of_leader(name, ">", first)
        age_s = time.time() - oldest[0].place.at / 1e6 if oldest else 0.0
        logger.warning(
            "the oldest events were deleted to bound the NATS server's memory (nats.max_memory)",
            stream=name,
            subjects=subjects,
            most=most,
            kept_h=round(age_s / 3600, 3),
        )
