"""Completing the trajectories of a group, and reading what became of a group. All handlers raise `ApiError`."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, TrajectoryCompleted, TrajectoryOpened, decode
from pipeline.names import check_name
from pipeline.statistics.metric_names import with_art_names
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.demonstrations import (
    DemonstratedTurn,
    check_demonstration,
    demonstrated_turns,
    record_demonstration,
)
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.api.schemas import GroupCompletion, GroupMember
from rollout_gateway.api.trajectories import check_batch, check_completion, complete_checked, runs_named
from rollout_gateway.http.errors import ApiError, check_group_size, check_shared, unknown_trajectory

_TASK_BYTES = 16 * 1024 * 1024
"""Bytes that the task of one request may take on the log: each member's opening has it."""


async def complete_group(request: ControlRequest) -> dict[str, Any]:
    """Complete the trajectories that the body names, one after the other, and return what was recorded of each. A
    member with `exchanges`, a `demonstration` or a `batch` that is not open is opened first.

    All members are checked, and demonstrations rendered, before the first one is changed. If a later one fails
    nevertheless, the same request completes the rest, and costs a single call."""
    gateway, access, (group,) = request.gateway, request.access, request.values
    body = request.read(GroupCompletion)
    check_group_size("trajectories", len(body.trajectories), gateway.config.gateway.max_group_size)
    check_shared("task", body.task, len(body.trajectories), _TASK_BYTES)
    ids = [member.id for member in body.trajectories]
    if repeated := next((name for i, name in enumerate(ids) if name in ids[:i]), None):
        message = f"Trajectory {repeated!r} is named twice. Name each trajectory once."
        raise ApiError(400, "invalid_body", message, param="trajectories")
    with request.charging(sum(map(runs_named, body.trajectories))) as looked_at:
        for member in body.trajectories:
            try:
                await check_completion(gateway, member, access, looked_at)
            except ApiError as error:
                error.message = f"Trajectory {member.id!r}: {error.message}"
                raise
            if not member.exchanges:
                looked_at.append(member.id)
            opened = await gateway.registry.opening(member.id)
            if member.demonstration is not None:
                check_demonstration(member, access)
            if opened is None and _may_be_opened(member):
                check_name(group)
                if body.model not in gateway.models_of(access):
                    raise gateway.unknown_model(body.model, access)
                await gateway.registry.check_references(member.id, body.model, member.exchanges)
            elif opened is None or not access.owns(opened.owner):
                raise unknown_trajectory(member.id)
            elif opened.group != group:
                message = f"Trajectory {member.id!r} belongs to group {opened.group!r}, not {group!r}."
                raise ApiError(400, "wrong_group", message)
            check_batch(member, group)
    turns: dict[str, list[DemonstratedTurn]] = {}
    for member in body.trajectories:
        if member.demonstration is not None:
            turns[member.id] = await demonstrated_turns(request, body.model, member)
    data = []
    for number, member in enumerate(body.trajectories, 1):
        if _may_be_opened(member):
            await _open(gateway, group, body, member, number, access)
        await record_demonstration(gateway, member.id, turns.get(member.id, ()))
        data.append(await complete_checked(gateway, member.id, member))
    return {"group": group, "data": data}


def _may_be_opened(member: GroupMember) -> bool:
    """Whether a member is made of calls of other trajectories or of a demonstration, or of nothing but a reward that
    counts in the baseline of a requested batch."""
    return bool(member.exchanges or member.demonstration or member.batch)


async def _open(
    gateway: Gateway, group: str, body: GroupCompletion, member: GroupMember, number: int, access: Access
) -> None:
    """Open a member, unless an earlier request did."""
    if (opened := await gateway.registry.opening(member.id)) is not None:
        if not access.owns(opened.owner) or opened.group != group:  # it was opened since the members were checked
            raise unknown_trajectory(member.id)
        return
    event = TrajectoryOpened(
        project=gateway.project,
        trajectory=member.id,
        model=body.model,
        group=group,
        task=body.task,
        attempt=number,
        split=body.split,
        group_size=len(body.trajectories),
        owner=access.owner,
    )
    # The first call says who answers the run: a decision that was made since does not count.
    for reference in member.exchanges[:1]:
        source = await gateway.registry.opening_for(reference.trajectory, access)
        sides = {name: getattr(source, name) for name in ("model", "asked", "pinned", "min_logprob") if source.asked}
        event = msgspec.structs.replace(event, **sides)
    # The groups of a requested batch wait for each other; the trainer bounds how many may.
    paced, assigned = member.batch is None, bool(member.exchanges)
    await gateway.registry.open(event, "", access, paced=paced, assigned=assigned)


async def get_group(request: ControlRequest) -> dict[str, Any]:
    """Whether a group was trained or discarded. `model` in the query may be left out if there is one model only."""
    gateway, access, (group,) = request.gateway, request.access, request.values
    models = gateway.models_of(access)
    model = request.query.get("model", models[0] if len(models) == 1 else "")
    if model not in models:
        raise gateway.unknown_model(model, access)
    owners = {name: await gateway.registry.groups.owner(name, group) for name in gateway.policies.sides(model)}
    own = [name for name, owner in owners.items() if owner is not None and access.owns(owner)]
    if not own and not access.operator:
        message = f"Group {group!r} is unknown: it was not opened here, or another API key opened it."
        raise ApiError(404, "group_not_found", message)
    unknown = {"version": "", "metrics": {}, "reason": "", "detail": ""}
    outcomes = []
    for name in own or [model]:
        outcome = await _outcome(gateway, name, group)
        if not access.sees(name):  # the version of a model that took over
            outcome = {field: value for field, value in outcome.items() if field not in ("version", "metrics")}
        outcomes.append(outcome)
    # Of a group that was opened around a decision, one part may be decided later.
    outcome = next((o for o in outcomes if o["status"] == "waiting"), outcomes[-1])
    return {"group": group, "model": model, **unknown, **outcome}


async def _outcome(gateway: Gateway, model: str, group: str) -> dict[str, Any]:
    """What the log says of a group. `waiting`: no checkpoint, discard or dead letter names it. `dead`: the trainer
    could not use it, or the judge that scored it ended, and it is among the dead letters."""
    state = gateway.policies.models.get(model)  # `None`: an outside model
    for checkpoint in reversed(state.checkpoints.values() if state is not None else ()):
        event = checkpoint.event
        if group in event.groups and event.branch == "main":
            return {"status": "trained", "version": event.version, "metrics": with_art_names(event.metrics)}
    discards = await gateway.broker.read(GroupDiscarded, project=gateway.project, model=model, group=group)
    for discard in (recorded.event for recorded in reversed(discards)):
        # `late` and `too_large` concern single trajectories.
        if discard.branch == "main" and discard.reason not in ("late", "too_large"):
            return {"status": "discarded", "reason": discard.reason, "detail": discard.detail}
    letters = await gateway.broker.read(DeadLettered, stream="GROUPS", consumer="trainer")
    if not await gateway.broker.read(GroupScored, project=gateway.project, model=model, group=group):
        judge = await gateway.broker.read(DeadLettered, stream="ROLLOUTS", consumer="judge")
        letters += [letter for letter in judge if letter.event.reason == "ended_service"]
    for letter in (recorded.event for recorded in letters):
        if _group_in(letter.payload) == (gateway.project, model, group):
            return {"status": "dead", "reason": letter.reason, "detail": letter.detail}
    return {"status": "waiting"}


def _group_in(payload: bytes) -> tuple[str, str, str] | None:
    """The project, model and group that a dead letter is about; `None` for an event about no group, and for what can't
    be decoded, which may be why the letter is dead."""
    try:
        event = decode(payload)
    except msgspec.DecodeError:
        return None
    if isinstance(event, TrajectoryCompleted):
        return event.project, event.model, event.group_key
    return (event.project, event.model, event.group) if isinstance(event, GroupScored) else None
