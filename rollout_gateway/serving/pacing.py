"""Limits how many groups may be open or untrained, so that none is stale when it is trained.

Discarding stale groups wastes what was sampled and starves long tasks, so a new group has to wait instead. A group
counts from the opening of its first trajectory at this replica until a checkpoint or a discard names it. Groups of
other replicas and of earlier processes do not count: the limit is approximate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.events import GroupDiscarded
from pipeline.log.broker import Broker
from pipeline.log.follow import follow_events
from pipeline.log.subjects import stream_of
from rollout_gateway.http.errors import ApiError

_MOST_WAITING = 10_000
"""Waiting groups whose first request is remembered. The oldest is forgotten first."""


class Pacing:
    """Counts the groups that are ahead of the trainer."""

    def __init__(self, project: str, limit: int) -> None:
        """`limit`: groups of a model at once; 0 for no limit."""
        self._project, self._limit = project, limit
        self._ahead: dict[str, set[str]] = {}
        """By model, the groups neither trained nor discarded."""
        self._waiting: dict[tuple[str, str], float] = {}
        """By model and group, when the group first had to wait."""
        self._next_seq = 0

    def admit(self, model: str, group: str, split: str) -> float:
        """Admit a trajectory of the group. Further trajectories of an admitted group always pass.

        Returns how many seconds the group had to wait, for the trajectory that it is admitted with. Raises a 429
        `ApiError`."""
        if not self._limit or split != "train":
            return 0.0
        ahead = self._ahead.setdefault(model, set())
        if group not in ahead and len(ahead) >= self._limit:
            self._waiting.setdefault((model, group), time.monotonic())
            if len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            raise ApiError(
                429,
                "groups_ahead",
                f"{len(ahead)} groups of {model} wait for training, and another one would be stale. Try again later.",
            )
        ahead.add(group)
        since = self._waiting.pop((model, group), None)
        return 0.0 if since is None else time.monotonic() - since

    def done(self, model: str, groups: tuple[str, ...]) -> None:
        """Stop counting groups that were trained or discarded."""
        self._ahead.get(model, set()).difference_update(groups)

    async def mark_position(self, broker: Broker) -> None:
        """Note the log's present end. `follow` begins there."""
        self._next_seq = (await broker.stream_info(stream_of(GroupDiscarded))).state.last_seq + 1

    async def follow(self, broker: Broker, on_discard: Callable[[GroupDiscarded], None]) -> None:
        """Stop counting groups as they are discarded, and call `on_discard` with each event. Never returns."""
        discarded = follow_events(broker, [GroupDiscarded], lambda: self._next_seq, project=self._project)
        async for recorded in discarded:
            self._next_seq = recorded.seq + 1
            self.done(recorded.event.model, (recorded.event.group,))
            on_discard(recorded.event)
