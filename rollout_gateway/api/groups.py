"""Completing the trajectories of a group in one request, and reading what became of a group.

A "member" is a trajectory in the body of the first route. It may be open already, or be opened by the request: then it
is made of calls that other trajectories recorded (`exchanges`), of a demonstration, or of nothing but a reward. All
handlers raise `ApiError`."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from pipeline.events import DeadLettered, GroupDiscarded, GroupScored, TrajectoryCompleted, TrajectoryOpened, decode
from pipeline.names import check_name
from pipeline.statistics.metric_names import RUN, with_art_names
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.demonstrations import check_demonstration, demonstrated_calls, record_demonstration
from rollout_gateway.api.gateway import ControlRequest, Gateway
from rollout_gateway.api.schemas import GroupCompletion, GroupMember
from rollout_gateway.api.trajectories import check_batch, check_completion, complete_after_checks, count_runs
from rollout_gateway.http.errors import ApiError, check_group_size, check_repeated_text, unknown_trajectory

_TASK_BYTES = 16 * 1024 * 1024
"""Bytes that the task of one request may take on the log, in the openings of all members together."""


async def complete_group(request: ControlRequest) -> dict[str, Any]:
    """Complete the trajectories that the body names, one after the other, and return what was recorded of each. A
    member with `exchanges`, a `demonstration` or a `batch` that is not open is opened first.

    All members are checked, and demonstrations rendered, before the first one is changed. If a later one fails
    nevertheless, the same request completes the rest."""
    gateway, access, (group,) = request.gateway, request.access, request.values
    body = request.read(GroupCompletion)
    check_group_size("trajectories", len(body.trajectories), gateway.config.gateway.max_group_size)
    check_repeated_text("task", body.task, len(body.trajectories), _TASK_BYTES)
    ids = Counter(member.id for member in body.trajectories)
    if repeated := next((name for name, times in ids.items() if times > 1), None):
        message = f"Trajectory {repeated!r} is named twice. Name each trajectory once."
        raise ApiError(400, "invalid_body", message, param="trajectories")
    request.charge_runs(sum(map(count_runs, body.trajectories)))
    for member in body.trajectories:
        await _check_member(gateway, access, group, body.model, member)
    calls = {
        member.id: await demonstrated_calls(request, body.model, group, member)
        for member in body.trajectories
        if member.demonstration is not None
    }
    data = []
    for number, member in enumerate(body.trajectories, 1):
        if _opened_by_completing(member):
            await _open_member(gateway, group, body, member, number, access)
        await record_demonstration(gateway, member.id, calls.get(member.id, ()))
        data.append(await complete_after_checks(gateway, member.id, member))
    return {"group": group, "data": data}


async def _check_member(gateway: Gateway, access: Access, group: str, model: str, member: GroupMember) -> None:
    """Raise an `ApiError` if a member can't be completed, or, if it is not open, not be opened for `model`."""
    try:
        await check_completion(gateway, member, access)
    except ApiError as error:
        error.message = f"Trajectory {member.id!r}: {error.message}"
        raise
    opened = await gateway.registry.opening(member.id)
    if member.demonstration is not None:
        check_demonstration(member, access)
    if opened is None and _opened_by_completing(member):
        check_name(group)
        if model not in gateway.models_of(access):
            raise gateway.unknown_model(model, access)
        await gateway.registry.check_references(member.id, model, member.exchanges)
    elif opened is None or not access.owns(opened.owner):
        raise unknown_trajectory(member.id)
    elif opened.group != group:
        message = f"Trajectory {member.id!r} belongs to group {opened.group!r}, not {group!r}."
        raise ApiError(400, "wrong_group", message)
    check_batch(gateway, member, access, model if opened is None else opened.model, group)


def _opened_by_completing(member: GroupMember) -> bool:
    """Whether the request opens a member that is not open. One that is made of nothing but a reward must be of a
    requested batch, in whose baseline the reward counts."""
    return bool(member.exchanges or member.demonstration or member.batch)


async def _open_member(
    gateway: Gateway, group: str, body: GroupCompletion, member: GroupMember, number: int, access: Access
) -> None:
    """Open the trajectory of a member with the fields of `body`, unless an earlier request did. `number`: its place in
    the group, from 1. Raises a 404 `ApiError` if another key or group has the trajectory."""
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
        decided = ("model", "asked", "pinned", "min_logprob") if source.asked else ()
        event = msgspec.structs.replace(event, **{name: getattr(source, name) for name in decided})
    # The groups of a requested batch wait for each other; the trainer bounds how many may.
    paced, assigned = member.batch is None, bool(member.exchanges)
    await gateway.registry.open(event, "", access, paced=paced, assigned=assigned)


async def get_group(request: ControlRequest) -> dict[str, Any]:
    """Return what became of a group: `GET /v1/groups/{group}?model={model}`. `model` may be left out if there is one
    model only."""
    gateway, access, (group,) = request.gateway, request.access, request.values
    models = gateway.models_of(access)
    query = dict(parse_qsl(request.http.target.partition("?")[2], keep_blank_values=True))
    model = query.get("model", models[0] if len(models) == 1 else "")
    if model not in models:
        raise gateway.unknown_model(model, access)
    owners = {
        name: await gateway.registry.groups.owner(name, group) for name in gateway.policies.answering_models(model)
    }
    own_models = [name for name, owner in owners.items() if owner is not None and access.owns(owner)]
    if not own_models and not access.operator:
        message = f"Group {group!r} is unknown: it was not opened here, or another API key opened it."
        raise ApiError(404, "group_not_found", message)
    unknown = {"version": "", "metrics": {}, "reason": "", "detail": ""}
    outcomes = [await _outcome_of(gateway, access, name, group) for name in own_models or [model]]
    # Of a group that was opened around a decision, one part may be decided later.
    outcome = next((o for o in outcomes if o["status"] == "waiting"), outcomes[-1])
    return {"group": group, "model": model, **unknown, **outcome}


async def _outcome_of(gateway: Gateway, access: Access, model: str, group: str) -> dict[str, Any]:
    """Return what became of a group of `model`, by the log, as fields of the answer to `get_group`. `status` is
    `trained`, `discarded`, `dead` (the trainer could not use it, or the judge that scored it ended, and it is among the
    dead letters) or `waiting` (none of these)."""
    state = gateway.policies.models.get(model)  # `None`: an outside model
    for checkpoint in reversed(state.checkpoints.values() if state is not None else ()):
        event = checkpoint.event
        if group in event.groups and event.branch == "main":
            # The means of agents' metrics are of all keys' runs in the step.
            metrics = {n: m for n, m in event.metrics.items() if access.operator or not n.startswith(RUN)}
            fields = {"version": event.version, "metrics": with_art_names(metrics)}
            # A key of an outside model alone is told nothing of its apprentice.
            return {"status": "trained", **(fields if access.sees(model) else {})}
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
    """Return the project, model and group of the event in a dead letter; `None` for an event about no group, and for a
    payload that can't be decoded, which may be the reason of the letter."""
    try:
        event = decode(payload)
    except msgspec.DecodeError:
        return None
    if isinstance(event, TrajectoryCompleted):
        return event.project, event.model, event.group_key
    return (event.project, event.model, event.group) if isinstance(event, GroupScored) else None
