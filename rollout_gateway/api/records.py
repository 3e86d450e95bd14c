"""Recording what others found out: people's labels, and evaluations, which an SDK client plays. Both raise
`ApiError`."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.events import GroupLabeled, Label, PolicyEvaluated
from pipeline.names import InvalidNameError, check_name, new_id, parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.api.groups import wrong_group
from rollout_gateway.api.schemas import EvaluationBody, GroupLabels
from rollout_gateway.http.body import check_numbers
from rollout_gateway.http.errors import ApiError, unknown_trajectory
from rollout_gateway.serving.idempotency import publish_once


async def label_group(request: ControlRequest) -> dict[str, Any]:
    """Record a person's scores of trajectories of a group."""
    gateway, access, group = request.gateway, request.access, request.values[0]
    body = request.read(GroupLabels)
    if body.request:
        check_name(body.request)
    model = ""
    for label in body.labels:
        opened = await gateway.registry.opening(label.trajectory)
        if opened is None:
            raise unknown_trajectory(label.trajectory)
        if opened.group != group:
            raise wrong_group(label.trajectory, opened, group)
        access.check_model(opened.model)
        model = opened.model
    if len({label.trajectory for label in body.labels}) < len(body.labels):
        message = "`labels` names a trajectory twice: send one score for each."
        raise ApiError(400, "invalid_body", message, param="labels")
    event = GroupLabeled(
        project=gateway.project,
        group=group,
        model=model,
        labels=tuple(Label(**msgspec.structs.asdict(label)) for label in body.labels),
        by=access.owner or body.by,
        source=body.source,
        request=body.request or new_id("l"),
    )
    await publish_once(gateway.broker, event, "request")
    return {"group": group, "by": event.by, "request": event.request}


async def record_evaluation(request: ControlRequest) -> dict[str, Any]:
    """Publish an evaluation. The same entrant again is the same event. The evaluation belongs to the key that
    recorded its first entrant."""
    gateway, access = request.gateway, request.access
    fields = msgspec.structs.asdict(request.read(EvaluationBody))
    event = PolicyEvaluated(project=gateway.project, by=access.owner, **fields)
    check_name(event.model)
    check_name(event.evaluation)
    check_numbers(msgspec.to_builtins(fields))
    for measure in event.measures:
        check_name(measure.name)
    if event.kind == "policy":
        if event.model not in gateway.policies.models:
            raise gateway.unknown_model(event.model, access)
        access.check_model(event.model)
        _check_version(gateway, event)
    await _check_owner(gateway, event, access)
    await publish_once(gateway.broker, event, "evaluation")
    return {"evaluation": event.evaluation, "position": event.position}


def _check_version(gateway: Gateway, event: PolicyEvaluated) -> None:
    """Raise a 400 `ApiError` unless `version` is one that the model has, or empty: versions changed meanwhile."""
    if not event.version:
        return
    newest = gateway.policies.newest(event.model, ())
    try:
        model, step = parse_version(event.version)
    except InvalidNameError:
        model, step = "", 0
    if model != event.model or step > parse_version(newest)[1]:
        message = (
            f"{event.version!r} is no version of {event.model!r}: name the one that played, up to {newest}."
        )
        raise ApiError(400, "invalid_name", message, param="version")


async def _check_owner(gateway: Gateway, event: PolicyEvaluated, access: Access) -> None:
    """Raise an `ApiError`: 409 if the evaluation belongs to another key, 404 if a run that it names does."""
    if access.operator:
        return
    entrants = await gateway.broker.read(
        PolicyEvaluated, project=gateway.project, evaluation=event.evaluation
    )
    if any(not access.owns(recorded.event.by) for recorded in entrants[:1]):
        message = f"Evaluation {event.evaluation!r} belongs to another API key. Choose another id."
        raise ApiError(409, "evaluation_exists", message, param="evaluation")
    for trajectory in {name for task in event.tasks for name in task.trajectories}:
        await gateway.registry.opening_for(trajectory, access)
