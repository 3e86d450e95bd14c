"""Completing the trajectories of a group, and reading what became of a group."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.events import (
    DeadLettered,
    GroupDiscarded,
    GroupLabeled,
    GroupScored,
    Label,
    TrajectoryOpened,
    decode,
)
from pipeline.log.broker import Broker
from pipeline.metric_names import named
from pipeline.names import check_name, new_id
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.schemas import (
    GroupCompleted,
    GroupCompletion,
    GroupLabels,
    GroupMember,
    GroupState,
    Labeled,
)
from rollout_gateway.api.trajectories import TrajectoryRoutes, check_batch
from rollout_gateway.capture.registry import Registry
from rollout_gateway.http.errors import ApiError, unknown_model, unknown_trajectory
from rollout_gateway.serving.idempotency import check_repeat
from rollout_gateway.serving.policies import Policies


@dataclass(eq=False)
class GroupRoutes:
    """Handlers of the routes about groups. All raise `ApiError`."""

    _broker: Broker
    _registry: Registry
    _policies: Policies
    _trajectories: TrajectoryRoutes

    async def complete_group(self, request: ControlRequest) -> GroupCompleted:
        """Complete trajectories of a group, one after the other. After a failure, the same request completes the
        rest."""
        group, body, access = request.values[0], request.read(GroupCompletion), request.access
        for member in body.trajectories:
            try:
                await self._trajectories.check(member, access)
            except ApiError as error:
                error.message = f"Trajectory {member.id!r}: {error.message}"
                raise
            opened = await self._registry.opening(member.id)
            if opened is None and member.exchanges:
                self._check_opening(group, body, access)
            elif opened is None or not access.owns(opened.owner):
                raise unknown_trajectory(member.id)
            elif opened.group != group:
                message = f"Trajectory {member.id!r} belongs to group {opened.group!r}, not {group!r}."
                raise ApiError(400, "wrong_group", message)
            check_batch(member, group)
        data = []
        for number, member in enumerate(body.trajectories, 1):
            if member.exchanges:
                await self._open(group, body, member, number, access)
            data.append(await self._trajectories.complete_as(member.id, member))
        return GroupCompleted(group=group, data=data)

    def _check_opening(self, group: str, body: GroupCompletion, access: Access) -> None:
        check_name(group)
        if body.model not in self._policies.models or not access.sees(body.model):
            raise unknown_model(body.model, [name for name in self._policies.models if access.sees(name)])

    async def _open(
        self, group: str, body: GroupCompletion, member: GroupMember, number: int, access: Access
    ) -> None:
        """Open a member that is made of calls of other trajectories, unless an earlier request did."""
        if await self._registry.opening(member.id) is not None:
            return
        check_name(member.id)
        event = TrajectoryOpened(
            project=self._registry.project,
            trajectory=member.id,
            model=body.model,
            group=group,
            task=body.task,
            attempt=number,
            split=body.split,
            group_size=len(body.trajectories),
            owner=access.owner,
        )
        await self._registry.open(event, "", access)

    async def label(self, request: ControlRequest) -> Labeled:
        """Record a person's scores of trajectories of a group."""
        group, body, access = request.values[0], request.read(GroupLabels), request.access
        if body.request:
            check_name(body.request)
        model = ""
        for label in body.labels:
            opened = await self._registry.opening(label.trajectory)
            if opened is None:
                raise unknown_trajectory(label.trajectory)
            if opened.group != group:
                message = f"Trajectory {label.trajectory!r} belongs to group {opened.group!r}, not {group!r}."
                raise ApiError(400, "wrong_group", message)
            access.check_model(opened.model)
            model = opened.model
        if len({label.trajectory for label in body.labels}) < len(body.labels):
            message = "`labels` names a trajectory twice: send one score for each."
            raise ApiError(400, "invalid_body", message, param="labels")
        event = GroupLabeled(
            project=self._registry.project,
            group=group,
            model=model,
            labels=tuple(
                Label(trajectory=label.trajectory, score=label.score, comment=label.comment)
                for label in body.labels
            ),
            by=access.owner or body.by,
            source=body.source,
            request=body.request or new_id("l"),
        )
        ack = await self._broker.publish(event)
        await check_repeat(self._broker, event, ack, "request")
        return Labeled(group=group, by=event.by, request=event.request)

    async def group(self, request: ControlRequest) -> GroupState:
        """Whether a group was trained or discarded. `model` in the query may be left out if there is one model only."""
        group, access = request.values[0], request.access
        models = [name for name in self._policies.models if access.sees(name)]
        model = request.query.get("model", models[0] if len(models) == 1 else "")
        if model not in models:
            raise unknown_model(model, models)
        if not access.operator:
            owner = await self._registry.groups.owner(model, group)
            if owner is None or not access.owns(owner):
                message = f"Group {group!r} is unknown: it was not opened here, or another API key opened it."
                raise ApiError(404, "group_not_found", message)
        for checkpoint in reversed(self._policies.models[model].checkpoints.values()):
            if group in checkpoint.event.groups and checkpoint.event.branch == "main":
                event = checkpoint.event
                return GroupState(
                    group=group,
                    model=model,
                    status="trained",
                    version=event.version,
                    metrics=named(event.metrics),
                )
        discards = await self._broker.read(
            GroupDiscarded, project=self._registry.project, model=model, group=group
        )
        for discard in (recorded.event for recorded in reversed(discards)):
            # `late` and `too_large` concern single trajectories.
            if discard.branch == "main" and discard.reason not in ("late", "too_large"):
                return GroupState(
                    group=group, model=model, status="discarded", reason=discard.reason, detail=discard.detail
                )
        for letter in (
            r.event for r in await self._broker.read(DeadLettered, stream="GROUPS", consumer="trainer")
        ):
            scored = decode(letter.payload) if letter.payload else None
            if isinstance(scored, GroupScored) and (scored.group, scored.model) == (group, model):
                return GroupState(
                    group=group, model=model, status="dead", reason=letter.reason, detail=letter.detail
                )
        return GroupState(group=group, model=model, status="waiting")
