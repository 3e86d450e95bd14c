"""Admission: no more groups at once than can be trained before they are stale.

Discarding stale groups wastes what was sampled and starves long tasks, so a new group is told to wait instead. A group
counts from the opening of its first trajectory here until a checkpoint or a discard names it. Known to this replica
only and from its start on: pacing steers, it promises nothing.
"""

from __future__ import annotations

import time

from pipeline.events import GroupDiscarded
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_events
from pipeline.log.subjects import stream_of
from rollout_gateway.http.errors import ApiError

_RETRY_AFTER_S = 1
_MAX_WAITING = 10_000
"""Groups told to wait whose first asking is remembered; the oldest is forgotten."""


class Pacing:
    """Counts the groups that are ahead of the trainer."""

    def __init__(self, project: str, limit: int) -> None:
        self._project, self._limit = project, limit
        self._ahead: dict[str, set[str]] = {}
        """By model, the groups neither trained nor discarded."""
        self._waiting: dict[tuple[str, str], float] = {}
        """When a group was first told to wait."""
        self._next_seq = 0

    def admit(self, model: str, group: str, split: str) -> float:
        """Take the group in, or raise a 429 `ApiError`. Further trajectories of a group that is in always pass.

        The seconds since the group was first told to wait, for the trajectory that brings it in."""
        if not self._limit or split != "train":
            return 0.0
        ahead = self._ahead.setdefault(model, set())
        if group not in ahead and len(ahead) >= self._limit:
            self._waiting.setdefault((model, group), time.monotonic())
            if len(self._waiting) > _MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
            raise ApiError(
                429,
                f"{len(ahead)} groups of {model} wait for training: a further one would be stale. Try again.",
                kind="rate_limit_error",
                code="groups_ahead",
                headers=((b"retry-after", str(_RETRY_AFTER_S).encode()),),
            )
        ahead.add(group)
        since = self._waiting.pop((model, group), None)
        return 0.0 if since is None else time.monotonic() - since

    def done(self, model: str, groups: tuple[str, ...]) -> None:
        """These were trained or discarded."""
        self._ahead.get(model, set()).difference_update(groups)

    async def begin(self, broker: Broker) -> None:
        """Note where the log stands: what is discarded from now on counts."""
        info = await broker.stream_info(stream_of(GroupDiscarded))
        self._next_seq = info.state.last_seq + 1

    async def follow(self, broker: Broker) -> None:
        """For ever: groups that are discarded are no longer ahead."""
        discarded = follow_events(broker, [GroupDiscarded], lambda: self._next_seq, project=self._project)
        async for recorded in discarded:
            self._next_seq = recorded.seq + 1
            self.done(recorded.event.model, (recorded.event.group,))
