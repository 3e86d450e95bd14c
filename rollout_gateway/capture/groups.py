"""Which key a group belongs to, and how many trajectories it has.

The first opening of a group says it, for ever: it is an event of its own (`rollout.group`), of which the log keeps one,
so gateways that open the same group at once agree. `Registry.open` has each run join its group here."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.events import GroupDiscarded, GroupOpened, GroupScored, TrajectoryOpened
from pipeline.log.broker import BrokerError, LogEntry
from pipeline.log.subjects import keys_of
from pipeline.names import time_of_id
from rollout_gateway.access.api_keys import Access
from rollout_gateway.capture.run_log import RunLog
from rollout_gateway.http.errors import ApiError

_REMEMBERED = 10_000
"""Openings of groups that are kept in memory, the newest ones."""


class Groups:
    """The groups of a project. All methods raise `BrokerError`."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._openings: dict[str, GroupOpened] = {}
        """Openings by their subject."""

    async def join(self, opened: TrajectoryOpened, access: Access) -> TrajectoryOpened:
        """Open the group of a trajectory that is about to be opened, or add the trajectory to it. Returns the event
        with the group's size.

        Raises a 409 `ApiError` if the group belongs to another key or has another size."""
        group = await self._open(opened)
        if not access.owns(group.owner):
            message = f"Group {opened.group!r} belongs to another API key. Choose another name."
            raise ApiError(409, "group_exists", message, param="group")
        if opened.group_size not in (0, group.group_size):
            message = (
                f"Group {opened.group!r} was opened with group_size {group.group_size}, not {opened.group_size}. "
                "Send the same size or none, or choose another name."
            )
            raise ApiError(409, "group_exists", message, param="group_size")
        return msgspec.structs.replace(opened, group_size=group.group_size)

    async def _open(self, opened: TrajectoryOpened) -> GroupOpened:
        """Return the opening of a trajectory's group. If the group is new, publish its opening: with the trajectory's
        owner and group size, or those of a run by whose id the group is named, and with the owner of its outcome if
        there is one."""
        event = GroupOpened(
            project=opened.project,
            model=opened.model,
            group=opened.group or opened.trajectory,
            owner=opened.owner,
            group_size=opened.group_size,
        )
        subject = event.subject()
        if known := self._openings.get(subject):
            return known
        if opened.group not in ("", opened.trajectory) and time_of_id(event.group):
            # The name looks like a run's id: it may be the group of a run that was opened without naming a group.
            run = await self._log.opening(event.group)
            if run is not None and (run.event.group, run.event.model) == (event.group, event.model):
                event = msgspec.structs.replace(event, owner=run.event.owner, group_size=run.event.group_size)
        owner = await self._owner_by_outcome(keys_of(event))
        if owner is not None:
            event = msgspec.structs.replace(event, owner=owner)
        ack = await self._log.publish(event, {})
        if ack.duplicate:
            recorded = await self._log.broker.read_last(GroupOpened, **keys_of(event))
            if recorded is None:
                raise BrokerError(f"the opening of group {event.group!r} is gone from the log")
            event = recorded.event
        self._openings[subject] = event
        if len(self._openings) > _REMEMBERED:
            del self._openings[next(iter(self._openings))]
        return event

    async def _owner_by_outcome(self, keys: dict[str, Any]) -> str | None:
        """Return the owner of a group by its outcome (scored or discarded); `None` if the log has none. The stream
        ROLLOUTS, which has the group's opening, keeps days; GROUPS, which has the outcome, keeps months. `keys`:
        project, model and group."""
        broker = self._log.broker
        recorded: LogEntry[GroupScored] | LogEntry[GroupDiscarded] | None = await broker.read_last(
            GroupScored, **keys
        ) or await broker.read_last(GroupDiscarded, **keys)
        return recorded.event.owner if recorded is not None else None

    async def owner(self, model: str, group: str) -> str | None:
        """Return the name of the key that a group belongs to. `None` if the log does not know the group."""
        keys = {"project": self._log.project, "model": model, "group": group}
        opened = await self._log.broker.read_last(GroupOpened, **keys)
        owner = opened.event.owner if opened is not None else await self._owner_by_outcome(keys)
        if owner is not None:
            return owner
        opening = await self._log.opening(group)
        return opening.event.owner if opening is not None and opening.event.model == model else None
