"""Batches that agents request: groups that are to be trained together, in a step of their own.

A group's event names its batch (`TrainingBatch`: owner, id, and the names of all its groups). A batch begins here with
its first group, and is complete once each of its groups waits here, was discarded or is a dead letter. The intake
(`trainer.intake`) adds groups and ends batches that stay incomplete; `trainer.queues` takes complete ones for a step.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, TrainingBatch
from pipeline.log.broker import Broker
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import is_name
from trainer.batches.groups import AdmittedGroup


@dataclass(eq=False)
class RequestedBatch:
    """Groups that their agent wants to be trained together."""

    request: TrainingBatch
    groups: list[AdmittedGroup] = field(default_factory=list)
    """Those that wait, in stream order."""
    settled: set[str] = field(default_factory=set)
    """Names of the groups that need not be waited for: they wait here already, were discarded, are dead letters, or
    have a name that no group can have."""
    changed: float = field(default_factory=anyio.current_time)
    """When the last of its groups began to wait or was discarded, in the event loop's time."""

    @property
    def complete(self) -> bool:
        """Whether no group needs to be waited for."""
        return self.settled.issuperset(self.request.groups)


class RequestedBatches:
    """The requested batches of one model whose step has not begun."""

    def __init__(self, broker: Broker, consumer: str, timeout_s: float) -> None:
        """`consumer`: name of the trainer's consumer, whose dead letters count as settled. `timeout_s`: time without a
        change after which a batch ends (`trainer.batch_timeout_s`)."""
        self._broker, self._consumer, self.timeout_s = broker, consumer, timeout_s
        self._batches: dict[tuple[str, str], RequestedBatch] = {}
        """By owner and id, in the order in which their first group came."""

    def groups(self) -> Iterator[AdmittedGroup]:
        """Yield the groups that wait."""
        for batch in self._batches.values():
            yield from batch.groups

    async def begin(self, event: GroupScored) -> None:
        """Begin the batch that a group belongs to, if this is the batch's first group. Call `add` next, without a wait
        between the two.

        Groups of the batch that were discarded before, or are dead letters, count as settled."""
        request = event.batch
        if request is None or _key(request) in self._batches:
            return
        batch = self._batches[_key(request)] = RequestedBatch(request)
        names = [name for name in request.groups if is_name(name)]
        batch.settled.update(set(request.groups).difference(names))  # no group can have such a name
        keys: dict[str, Any] = {"project": event.project, "model": event.model}
        # Asked once: a batch may name thousands of groups, and others wait for the intake meanwhile.
        of_model = subject_filter(GroupDiscarded, **keys)
        discarded = set(await self._broker.subjects(stream_of(GroupDiscarded), of_model)) if len(names) > 1 else set()
        for name in names:
            keys |= {"group": name, "branch": event.branch}
            if subject_filter(GroupDiscarded, **keys) not in discarded:
                continue
            discards = [r.event for r in await self._broker.read(GroupDiscarded, **keys)]
            # A `too_large` discard is about some runs of a group; the group itself trained.
            if any(e.split == event.split and e.reason != "too_large" for e in discards):
                batch.settled.add(name)
        letters = await self._broker.read(DeadLettered, stream="GROUPS", consumer=self._consumer)
        subjects = [letter.event.original_subject for letter in letters]
        for name in names:
            # What stands before the filter's `>` begins every subject of the group, whatever its judge and branch.
            prefix = subject_filter(GroupScored, project=event.project, model=event.model, group=name)
            if any(subject.startswith(prefix.removesuffix(">")) for subject in subjects):
                batch.settled.add(name)
        # The discard of another of its groups may have removed it during the reads, because it holds no group yet.
        self._batches.setdefault(_key(request), batch)

    def add(self, request: TrainingBatch, group: AdmittedGroup) -> None:
        """Add a group to the batch that `begin` has just begun, in stream order."""
        batch = self._batches[_key(request)]
        insort(batch.groups, group, key=lambda other: other.place.seq)
        batch.settled.add(group.event.group)
        batch.changed = anyio.current_time()

    def settle(self, event: GroupScored) -> None:
        """Remove a discarded group from its batch, which then no longer waits for it."""
        request = event.batch
        batch = self._batches.get(_key(request)) if request is not None else None
        if batch is None:
            return
        batch.settled.add(event.group)
        batch.changed = anyio.current_time()
        batch.groups = [group for group in batch.groups if group.event.group != event.group]
        if not batch.groups:
            del self._batches[_key(batch.request)]  # the batch's next group, if there is one, begins it again

    @property
    def complete(self) -> RequestedBatch | None:
        """The first batch that is complete."""
        return next((batch for batch in self._batches.values() if batch.complete), None)

    def take_complete(self) -> RequestedBatch | None:
        """Remove the first batch that is complete, and return it."""
        batch = self.complete
        return None if batch is None else self._batches.pop(_key(batch.request))

    def incomplete(self) -> list[RequestedBatch]:
        """Return the batches that are not complete, oldest first."""
        return [batch for batch in self._batches.values() if not batch.complete]


def batches_to_end(
    of_models: Mapping[str, RequestedBatches], most_groups: int
) -> list[tuple[str, RequestedBatch, str]]:
    """Return the incomplete batches that are to be discarded, as (model, batch, reason). These are the batches in which
    no group was scored or discarded for their `timeout_s`. If more than `most_groups` groups wait in the others, they
    are also the oldest batches of the owner with the most waiting groups, one after the other, until no more than
    `most_groups` wait."""
    now = anyio.current_time()
    ended: list[tuple[str, RequestedBatch, str]] = []
    waiting: dict[str, deque[tuple[str, RequestedBatch]]] = {}
    for model, requested in of_models.items():
        for batch in requested.incomplete():
            if now - batch.changed < requested.timeout_s:
                waiting.setdefault(batch.request.owner, deque()).append((model, batch))
                continue
            why = f"no group of batch {batch.request.id} was scored or discarded for {requested.timeout_s:g} s"
            ended.append((model, batch, why))
    counts = Counter({owner: sum(len(b.groups) for _, b in of_owner) for owner, of_owner in waiting.items()})
    while counts.total() > most_groups:
        owner, count = counts.most_common(1)[0]
        model, batch = waiting[owner].popleft()
        counts[owner] -= len(batch.groups)
        why = f"{count} groups of key {owner!r} wait for others of their batches, of {most_groups} for all keys"
        ended.append((model, batch, why))
    return ended


def _key(request: TrainingBatch) -> tuple[str, str]:
    return request.owner, request.id
