"""How the runs of a project were opened and completed. Every read is answered by the log's leader."""

from __future__ import annotations

import msgspec

from pipeline.events import ExchangeRecorded, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker, Recorded
from pipeline.log.subjects import stream_of, subject_filter
from pipeline.names import name_of_token

STREAM = stream_of(ExchangeRecorded)


class RunLog:
    """The openings and completions of a project's runs."""

    def __init__(self, broker: Broker, project: str) -> None:
        self.broker, self.project = broker, project
        self.not_recorded = 0
        """Calls of all runs that were answered and are not on the log; see `Trajectory.not_recorded`."""

    @property
    def reconnects(self) -> int:
        """How often the connection to the log's server was made again."""
        return int(self.broker.client.stats["reconnects"])

    async def opening(self, trajectory: str) -> Recorded[TrajectoryOpened] | None:
        """The event that opened a trajectory. `None` if it was never opened."""
        return await self.broker.read_last(TrajectoryOpened, project=self.project, trajectory=trajectory)

    async def completion(self, opened: TrajectoryOpened) -> TrajectoryCompleted | None:
        """The event that completed a trajectory. `None` if it is open."""
        recorded = await self.broker.read_last(
            TrajectoryCompleted, project=self.project, model=opened.model, trajectory=opened.trajectory
        )
        return recorded.event if recorded is not None else None

    async def calls(self, trajectory: str) -> list[Recorded[ExchangeRecorded]]:
        """All exchanges of a trajectory, in the order of the log."""
        return await self.broker.read(ExchangeRecorded, project=self.project, trajectory=trajectory)

    async def unfinished(self, prefix: str) -> list[str]:
        """Ids of the open trajectories whose id begins with `prefix`. Reads all subjects of the project."""
        ids: list[set[str]] = []
        for event in (TrajectoryOpened, TrajectoryCompleted):
            subjects = await self.broker.subjects(STREAM, subject_filter(event, project=self.project))
            tokens = (subject.rpartition(".")[2] for subject in subjects)
            ids.append({name_of_token(token) for token in tokens if token.startswith(prefix)})
        opened, completed = ids
        return sorted(opened - completed)


def same_opening(a: TrajectoryOpened, b: TrajectoryOpened) -> bool:
    """Whether two openings agree in everything but their times, so that one may be a client's retry of the other."""
    return msgspec.structs.replace(a, at=0, paced_s=0) == msgspec.structs.replace(b, at=0, paced_s=0)
