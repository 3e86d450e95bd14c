"""Recording evaluations, which an SDK client plays."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipeline.events import PolicyEvaluated
from pipeline.log.broker import Broker
from pipeline.names import check_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.schemas import EvaluationBody, Recorded
from rollout_gateway.capture.registry import Registry
from rollout_gateway.http.body import check_numbers
from rollout_gateway.http.errors import ApiError, unknown_model, unknown_trajectory
from rollout_gateway.serving.idempotency import check_repeat
from rollout_gateway.serving.policies import Policies


@dataclass(eq=False)
class EvaluationRoutes:
    """Handler of the route about evaluations."""

    _project: str
    _broker: Broker
    _registry: Registry
    _policies: Policies

    async def record_evaluation(self, request: ControlRequest) -> Recorded:
        """Publish an evaluation. The same entrant again is the same event. The evaluation belongs to the key that
        recorded its first entrant. Raises `ApiError`."""
        body = request.read(EvaluationBody)
        fields = msgspec.structs.asdict(body)
        event = PolicyEvaluated(project=self._project, by=request.access.owner, **fields)
        check_name(event.model)
        check_name(event.evaluation)
        check_numbers(msgspec.to_builtins(fields))
        for measure in event.measures:
            check_name(measure.name)
        if event.kind == "policy":
            if event.model not in self._policies.models:
                raise unknown_model(event.model, [n for n in self._policies.models if request.access.sees(n)])
            request.access.check_model(event.model)
        await self._check_owner(event, request.access)
        ack = await self._broker.publish(event)
        await check_repeat(self._broker, event, ack, "evaluation")
        return Recorded(evaluation=event.evaluation, position=event.position)

    async def _check_owner(self, event: PolicyEvaluated, access: Access) -> None:
        """Raise an `ApiError`: 409 if the evaluation belongs to another key, 404 if a run that it names does."""
        if access.operator:
            return
        entrants = await self._broker.read(
            PolicyEvaluated, project=self._project, evaluation=event.evaluation
        )
        if any(not access.owns(recorded.event.by) for recorded in entrants[:1]):
            message = f"Evaluation {event.evaluation!r} belongs to another API key. Choose another id."
            raise ApiError(409, "evaluation_exists", message, param="evaluation")
        for trajectory in {name for task in event.tasks for name in task.trajectories}:
            opened = await self._registry.opening(trajectory)
            if opened is None or not access.owns(opened.owner):
                raise unknown_trajectory(trajectory)
