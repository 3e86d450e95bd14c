"""The handler of each route of the control API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollout_gateway.api import openapi
from rollout_gateway.api.control_request import ControlRequest, RawAnswer
from rollout_gateway.api.evaluations import EvaluationRoutes
from rollout_gateway.api.groups import GroupRoutes
from rollout_gateway.api.metrics import CONTENT_TYPE, Metrics
from rollout_gateway.api.models import ModelRoutes
from rollout_gateway.api.tokens import TokenRoutes
from rollout_gateway.api.trajectories import TrajectoryRoutes

Handler = Callable[[ControlRequest], Awaitable[Any]]


def handler_table(
    metrics: Metrics,
    trajectories: TrajectoryRoutes,
    groups: GroupRoutes,
    models: ModelRoutes,
    evaluations: EvaluationRoutes,
    tokens: TokenRoutes,
) -> Mapping[str, Handler]:
    """Return the handlers by `Route.name`."""

    async def metrics_page(_: ControlRequest) -> RawAnswer:
        return RawAnswer(200, metrics.text(), CONTENT_TYPE)

    async def openapi_document(_: ControlRequest) -> RawAnswer:
        return RawAnswer(200, openapi.encoded())

    return {
        "health": models.health, "metrics": metrics_page, "openapi": openapi_document,
        "models": models.models, "model": models.model, "policies": models.policies,
        "watch_policies": models.watch_policies, "decide": models.decide,
        "open": trajectories.open, "list": trajectories.list, "get": trajectories.get,
        "complete": trajectories.complete,
        "complete_group": groups.complete_group, "label": groups.label, "group": groups.group,
        "record_evaluation": evaluations.record_evaluation,
        "tokenize": tokens.tokenize, "count_tokens": tokens.count_tokens,
    }  # fmt: skip
