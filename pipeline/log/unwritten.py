"""Alarms about events that the store has not written, and that the log deletes soon or has deleted.

A stream with a limit of age deletes its oldest events whether consumers have read them or not. Each store service calls
`UnwrittenEvents.check` when it checks its alarms, so that an operator hears of a store that is behind before events are
lost, and of every loss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline import streams
from pipeline.log.broker import Broker
from pipeline.log.messages import Place


@dataclass(frozen=True)
class Unwritten:
    """That a consumer of the store is behind, or that events were deleted before it wrote them."""

    consumer: str
    share: float
    """Age of the oldest event that is not written, as a share of its stream's age limit; 1 if the log deleted it."""
    detail: str
    """What is wrong and what to do, for the operator."""


class UnwrittenEvents:
    """Finds events of the store's consumers that wait too long to be written, or were deleted."""

    def __init__(self, share: float) -> None:
        """`share`: an event waits too long if its age is this share of its stream's age limit, or more."""
        self._share = share
        self._oldest: dict[str, Place] = {}
        """The oldest event that was not written at the last check, by consumer."""
        self._lost: dict[str, int] = {}
        """Sequence of the first event that was deleted before it was written, by consumer."""

    async def check(self, broker: Broker) -> list[Unwritten]:
        """Return what is wrong now with each consumer of the store. A loss is returned by every later check, too.
        Raises nats-py's errors and `BrokerError`, also where one of the consumers is missing."""
        consumers = [spec for spec in streams.CONSUMERS if spec.name.startswith("store-")]
        return [unwritten for spec in consumers for unwritten in await self._check_consumer(broker, spec)]

    async def _check_consumer(self, broker: Broker, spec: streams.ConsumerSpec) -> list[Unwritten]:
        """Return what is wrong with a consumer: it lost events, its oldest event waits too long, both, or nothing."""
        oldest, before = await _oldest_unread(broker, spec), self._oldest.pop(spec.name, None)
        # The oldest event of the last check (`before`) is no longer unread: it was written, or the log deleted it.
        passed = before is not None and (oldest is None or oldest.seq > before.seq)
        if before is not None and passed and not await broker.holds(spec.stream, before):
            floor = (await broker.consumer_info(spec)).ack_floor
            if floor is None or int(floor.stream_seq) < before.seq:  # gone, although the store did not acknowledge it
                self._lost.setdefault(spec.name, before.seq)
        out = []
        if spec.name in self._lost:
            detail = (
                f"{spec.stream} deleted events that {spec.name} had not written, from message {self._lost[spec.name]} "
                "on: the history lacks them. Raise nats.rollouts_max_age_h or nats.max_bytes, and see why the store "
                "was behind"
            )
            out.append(Unwritten(spec.name, 1.0, detail))
        if oldest is None:
            return out
        self._oldest[spec.name] = oldest
        limit_s = (await broker.stream_info(spec.stream)).config.max_age or 0.0
        age_s = time.time() - oldest.at / 1e6
        if limit_s and age_s >= self._share * limit_s:
            detail = (
                f"{spec.name} has not written an event of {spec.stream} that is {age_s / 3600:.1f} h old; the log "
                f"deletes events at {limit_s / 3600:g} h. Start the store, or raise nats.rollouts_max_age_h until it "
                "has caught up"
            )
            out.append(Unwritten(spec.name, age_s / limit_s, detail))
        return out


async def _oldest_unread(broker: Broker, spec: streams.ConsumerSpec) -> Place | None:
    """Return the place of the oldest event that a consumer has not acknowledged; `None` if there is none."""
    if (first := await broker.first_unread(spec)) is None:
        return None
    oldest = await broker.next_of_leader(spec.stream, spec.subjects[0], first)
    return oldest[0].place if oldest else None
