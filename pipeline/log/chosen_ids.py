"""Trajectory ids that callers chose, remembered after their trajectories expired.

An id that Journeywork made carries its date (`pipeline.names.new_dated_id`), so an expired one is recognised without
any memory. A caller's own id is a label without a date. Its hash is written to stream IDS before its trajectory is
opened, and stays there for 30 days. The hashes share 65,536 subjects of a project, because the server holds every
subject in memory, and messages on disk.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import aclosing

from pipeline.log.broker import Broker
from pipeline.names import subject_token
from pipeline.streams import IDS


async def first_used(broker: Broker, project: str, name: str) -> float:
    """Return when `name` was first used as a trajectory id, in Unix seconds, and remember it if that is now.

    Raises `BrokerError`."""
    digest = hashlib.sha256(f"{project}\0{name}".encode()).digest()
    subject = f"id.{subject_token(project)}.{digest[:2].hex()}"
    entry = digest[2:18]
    async with aclosing(broker.messages(IDS.name, subject=subject)) as remembered:
        async for message in remembered:
            if message.payload == entry:
                return message.place.at / 1e6
    await broker.publish_bytes(subject, entry, message_id=f"id/{digest.hex()}")
    return time.time()
