"""`POST /v1/evaluations`: records the results of one entrant of an evaluation.

`journeywork eval` plays the held-out tasks and computes the results; the gateway checks and publishes them. An
evaluation compares several entrants (versions, or models of others) and has one request, and so one event, for each.
The handler raises `ApiError`."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.events import PolicyEvaluated
from pipeline.names import check_name, is_version, parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway
from rollout_gateway.api.schemas import EvaluationBody
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.idempotency import publish_once


async def record_evaluation(request: ControlRequest) -> dict[str, Any]:
    """Publish the results of one entrant. A repeated request is one event. The evaluation belongs to the key that
    recorded its first entrant."""
    gateway, access = request.gateway, request.access
    fields = msgspec.structs.asdict(request.read(EvaluationBody))
    event = PolicyEvaluated(project=gateway.project, by=access.owner, **fields)
    check_name(event.model)
    check_name(event.evaluation)
    for measure in event.measures:
        check_name(measure.name)
    outside = event.model in gateway.router.outside
    known = gateway.policies.state(event.model) is not None
    if known or outside:  # an external model may have the name of one
        access.check_model(event.model)
    if event.kind == "policy" and not outside:
        if not known:
            raise gateway.unknown_model(event.model, access)
        _check_version(gateway, event)
    elif event.version:
        message = "An external or outside model has no policy version: leave `version` out."
        raise ApiError(400, "invalid_name", message, param="version")
    await _check_owner(gateway, event, access)
    event = await gateway.registry.log.masks.apply(event)
    await publish_once(gateway.broker, event, "evaluation")
    return {"evaluation": event.evaluation, "position": event.position}


def _check_version(gateway: Gateway, event: PolicyEvaluated) -> None:
    """Raise a 400 `ApiError` if the model never had the event's `version`. It is empty if the version changed while the
    evaluation was played."""
    if not event.version:
        return
    newest = gateway.policies.newest(event.model, ())
    model, step = parse_version(event.version) if is_version(event.version) else ("", 0)
    if model != event.model or step > parse_version(newest)[1]:
        message = f"{event.version!r} is no version of {event.model!r}: name the one that played, up to {newest}."
        raise ApiError(400, "invalid_name", message, param="version")


async def _check_owner(gateway: Gateway, event: PolicyEvaluated, access: Access) -> None:
    """Raise an `ApiError`: 409 if the evaluation belongs to another key, 404 if a run that it names does."""
    if access.operator:
        return
    entrants = await gateway.broker.read(PolicyEvaluated, project=gateway.project, evaluation=event.evaluation)
    if any(not access.owns(recorded.event.by) for recorded in entrants[:1]):
        message = f"Evaluation {event.evaluation!r} belongs to another API key. Choose another id."
        raise ApiError(409, "evaluation_exists", message, param="evaluation")
    for trajectory in {name for task in event.tasks for name in task.trajectories}:
        await gateway.registry.opening_for(trajectory, access)
