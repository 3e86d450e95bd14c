"""Which groups a training line has used up: what must be acknowledged and not trained when it comes again."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.events import CheckpointPublished, unpack_seqs
from pipeline.log.place import Place


class Trained(NamedTuple):
    """A group that a checkpoint learned from."""

    place: Place
    version: str


class Consumed:
    """Groups by their places in GROUPS: sequence and stream time, since a power cut makes the server count again."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._named: set[tuple[int, str]] = set()
        """Sequence and group id, of checkpoints from before stream times were recorded."""
        self._trained: dict[tuple[str, str], Trained] = {}

    def add(self, place: Place) -> None:
        """A group that was discarded or buried."""
        self._places.add(place)

    def checkpoint(self, event: CheckpointPublished) -> None:
        """The groups of a checkpoint."""
        seqs = unpack_seqs(event.group_seqs).tolist() or [0] * len(event.groups)
        times = unpack_seqs(event.group_times).tolist() or [0] * len(seqs)
        for seq, at, group in zip(seqs, times, event.groups, strict=True):
            place = Place(seq, at)
            if at:
                self._places.add(place)
            else:
                self._named.add((seq, group))
            self._trained[event.model, group] = Trained(place, event.version)

    def has(self, place: Place, group: str) -> bool:
        """Whether the event of `group` at `place` was used up."""
        return place in self._places or (place.seq, group) in self._named

    def trained(self, model: str, group: str) -> Trained | None:
        """Where the group of that id lay that a checkpoint learned from; None where there is none."""
        return self._trained.get((model, group))
