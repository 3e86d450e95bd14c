"""The groups that a trainer is done with: they are acknowledged and not trained when they are delivered again."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.events import CheckpointPublished, GroupScored, unpack_seqs
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.log.messages import Place
from pipeline.log.subjects import stream_of
from trainer.batches.groups import Refusal


class TrainedGroup(NamedTuple):
    """A group that a checkpoint learned from."""

    place: Place
    version: str


class Consumed:
    """The groups that were trained, discarded or moved to the dead letters, by their places in the stream GROUPS. A
    place is sequence and stream time, since the server reuses sequences after a power cut."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._trained: dict[tuple[str, str], TrainedGroup] = {}
        self.floor = 0
        """Stream sequence up to which every group is acknowledged. Places up to it are not kept."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, place: Place) -> None:
        """Add a group that was trained, discarded or moved to the dead letters."""
        self._places.add(place)

    def add_checkpoint(self, event: CheckpointPublished, first_seq: int) -> None:
        """Add the groups that a checkpoint learned from. Those before `first_seq`, the stream's first message, are left
        out: retention deleted them, so they can't be delivered again."""
        seqs, times = unpack_seqs(event.group_seqs).tolist(), unpack_seqs(event.group_times).tolist()
        # Not strict: events from before sequences and stream times were recorded have none. `decode` checks that the
        # numbers agree otherwise.
        for seq, at, group in zip(seqs, times, event.groups, strict=False):
            if seq >= first_seq:
                self._places.add(Place(seq, at))
                self._trained[event.model, group] = TrainedGroup(Place(seq, at), event.version)

    def forget(self, floor: int) -> None:
        """Drop the places up to the sequence `floor`, up to which every group is acknowledged."""
        self.floor = max(self.floor, floor)
        self._places = {place for place in self._places if place.seq > self.floor}

    def __contains__(self, place: Place) -> bool:
        return place in self._places

    async def refuse_repeated(self, event: GroupScored, broker: Broker) -> Refusal | None:
        """Return the refusal of a group that a checkpoint learned from before this trainer started, and that was scored
        again because the log lost its event in a power cut. `None` for other groups.

        If the earlier event is still on the log, or the stream's retention removed it, `event` is another group with
        the same name."""
        trained = self._trained.get((event.model, event.group))
        if trained is None:
            return None
        try:
            earlier = await broker.read_at(GroupScored, trained.place.seq)
        except HistoryGoneError:
            if trained.place.seq < (await broker.stream_info(stream_of(GroupScored))).state.first_seq:
                return None
        else:
            if earlier.place == trained.place:
                return None
        return Refusal(
            "repeated",
            f"already trained in {trained.version}; the log lost the group's first event and it was scored again",
        )
