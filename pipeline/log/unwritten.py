"""Events that the store has not written yet, and how soon the log deletes them.

A stream with a limit of age deletes its oldest events whether consumers have read them or not. Each store service asks
here at every check of its alarms, so that an operator hears of a store that is behind long before, and of every loss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline import streams
from pipeline.log.broker import Broker
from pipeline.log.messages import Place


@dataclass(frozen=True)
class Unwritten:
    """Events that a consumer of the store has not written."""

    consumer: str
    share: float
    """Age of the oldest as a share of its stream's limit; 1 if the log deleted it."""
    detail: str
    """What is wrong and what to do, for the operator."""


class UnwrittenEvents:
    """Watches the store's consumers. `share`: the share of a stream's age limit from which on a wait is told."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._oldest: dict[str, Place] = {}
        """The oldest event that was not written at the last check, by consumer."""
        self._lost: dict[str, int] = {}
        """Sequence of the first event that was deleted before it was written, by consumer."""

    async def check(self, broker: Broker) -> list[Unwritten]:
        """Return what is wrong now. A loss stays. Raises nats-py's errors and `BrokerError`, also where one of the
        consumers is missing."""
        out = []
        for spec in streams.CONSUMERS:
            if spec.name.startswith("store-"):
                out += await self._of_consumer(broker, spec)
        return out

    async def _of_consumer(self, broker: Broker, spec: streams.ConsumerSpec) -> list[Unwritten]:
        """Return what is wrong with a consumer. The event that was its oldest at the last check (`before`) has been
        written since, or the log has deleted it: then the consumer passed it without an acknowledgement."""
        oldest, before = await _oldest_unread(broker, spec), self._oldest.pop(spec.name, None)
        passed = before is not None and (oldest is None or oldest.seq > before.seq)
        if before is not None and passed and not await broker.holds(spec.stream, before):
            floor = (await broker.consumer_info(spec)).ack_floor
            if floor is None or int(floor.stream_seq) < before.seq:  # gone, although the store did not acknowledge it
                self._lost.setdefault(spec.name, before.seq)
        found = []
        if spec.name in self._lost:
            detail = (
                f"{spec.stream} deleted events that {spec.name} had not written, from message {self._lost[spec.name]} "
                "on: the history lacks them. Raise nats.rollouts_max_age_h or nats.max_bytes, and see why the store "
                "was behind"
            )
            found.append(Unwritten(spec.name, 1.0, detail))
        if oldest is None:
            return found
        self._oldest[spec.name] = oldest
        limit_s = (await broker.stream_info(spec.stream)).config.max_age or 0.0
        age_s = time.time() - oldest.at / 1e6
        if limit_s and age_s >= self._share * limit_s:
            detail = (
                f"{spec.name} has not written an event of {spec.stream} that is {age_s / 3600:.1f} h old; the log "
                f"deletes events at {limit_s / 3600:g} h. Start the store, or raise nats.rollouts_max_age_h until it "
                "has caught up"
            )
            found.append(Unwritten(spec.name, age_s / limit_s, detail))
        return found


async def _oldest_unread(broker: Broker, spec: streams.ConsumerSpec) -> Place | None:
    """Return the place of the oldest event that a consumer has not acknowledged; `None` if there is none."""
    if (first := await broker.first_unread(spec)) is None:
        return None
    oldest = await broker.next_of_leader(spec.stream, spec.subjects[0], first)
    return oldest[0].place if oldest else None
