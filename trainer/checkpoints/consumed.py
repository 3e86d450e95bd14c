"""The groups that a model is done with: they are acknowledged and not trained when they are delivered again."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.events import CheckpointPublished, unpack_seqs
from pipeline.log.messages import Place


class ConsumedGroup(NamedTuple):
    """A group that a checkpoint learned from."""

    place: Place
    version: str


class Consumed:
    """Groups by their place in GROUPS. A place is sequence and stream time, since the server reuses sequences after a
    power cut."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._named: set[tuple[int, str]] = set()
        """(sequence, group id) of the groups of checkpoints that have no stream times."""
        self._trained: dict[tuple[str, str], ConsumedGroup] = {}

    def add(self, place: Place) -> None:
        """Add a group that was discarded or moved to the dead letters."""
        self._places.add(place)

    def add_checkpoint(self, event: CheckpointPublished) -> None:
        """Add the groups that a checkpoint learned from."""
        seqs = unpack_seqs(event.group_seqs).tolist() or [0] * len(event.groups)
        times = unpack_seqs(event.group_times).tolist() or [0] * len(seqs)
        for seq, at, group in zip(seqs, times, event.groups, strict=True):
            place = Place(seq, at)
            if at:
                self._places.add(place)
            else:
                self._named.add((seq, group))
            self._trained[event.model, group] = ConsumedGroup(place, event.version)

    def has(self, place: Place, group: str) -> bool:
        """Whether the event of `group` at `place` was added."""
        return place in self._places or (place.seq, group) in self._named

    def trained(self, model: str, group: str) -> ConsumedGroup | None:
        """The group's place on the log when a checkpoint of `model` trained on it, and that checkpoint's version;
        `None` if no checkpoint did."""
        return self._trained.get((model, group))
