"""The groups that a model is done with: they are acknowledged and not trained when they are delivered again."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.events import CheckpointPublished, GroupScored, unpack_seqs
from pipeline.log.messages import Place


class ConsumedGroup(NamedTuple):
    """A group that a checkpoint learned from."""

    place: Place
    version: str


class Consumed:
    """Groups by model, group id and place in GROUPS. A place is sequence and stream time, since the server reuses
    sequences after a power cut. Model and group id lead to the partition that the place is of."""

    def __init__(self) -> None:
        self._places: set[tuple[str, str, Place]] = set()
        self._named: set[tuple[int, str]] = set()
        """(sequence, group id) of the groups of checkpoints that have no stream times."""
        self._trained: dict[tuple[str, str], ConsumedGroup] = {}

    def add(self, event: GroupScored, place: Place) -> None:
        """Add a group that was discarded or moved to the dead letters."""
        self._places.add((event.model, event.group, place))

    def add_checkpoint(self, event: CheckpointPublished) -> None:
        """Add the groups that a checkpoint learned from."""
        seqs = unpack_seqs(event.group_seqs).tolist() or [0] * len(event.groups)
        times = unpack_seqs(event.group_times).tolist() or [0] * len(seqs)
        for seq, at, group in zip(seqs, times, event.groups, strict=True):
            place = Place(seq, at)
            if at:
                self._places.add((event.model, group, place))
            else:
                self._named.add((seq, group))
            self._trained[event.model, group] = ConsumedGroup(place, event.version)

    def has(self, event: GroupScored, place: Place) -> bool:
        """Whether the event at `place` was added."""
        found = (event.model, event.group, place) in self._places
        return found or (place.seq, event.group) in self._named

    def trained(self, model: str, group: str) -> ConsumedGroup | None:
        """The group's place on the log when a checkpoint of `model` trained on it, and that checkpoint's version;
        `None` if no checkpoint did."""
        return self._trained.get((model, group))
