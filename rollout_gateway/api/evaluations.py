"""Recording evaluations, which an SDK client plays."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipeline.events import PolicyEvaluated
from pipeline.log.broker import Broker
from pipeline.names import check_name
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.schemas import EvaluationBody, Recorded
from rollout_gateway.http.errors import unknown_model
from rollout_gateway.serving.idempotency import check_repeat
from rollout_gateway.serving.policies import Policies


@dataclass(eq=False)
class EvaluationRoutes:
    """Handler of the route about evaluations."""

    _project: str
    _broker: Broker
    _policies: Policies

    async def record_evaluation(self, request: ControlRequest) -> Recorded:
        """Publish an evaluation. The same entrant again is the same event. Raises `ApiError`."""
        body = request.read(EvaluationBody)
        fields = msgspec.structs.asdict(body)
        event = PolicyEvaluated(project=self._project, by=request.access.owner, **fields)
        check_name(event.model)
        check_name(event.evaluation)
        if event.kind == "policy":
            if event.model not in self._policies.models:
                raise unknown_model(event.model, [n for n in self._policies.models if request.access.sees(n)])
            request.access.check_model(event.model)
        ack = await self._broker.publish(event)
        await check_repeat(self._broker, event, ack, "evaluation")
        return Recorded(evaluation=event.evaluation, position=event.position)
