"""Models, their versions, decisions about them, and the state of the inference servers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from msgspec import UNSET

from pipeline.events import PolicyPromoted
from pipeline.names import parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.control_request import ControlRequest
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.schemas import (
    Health,
    Model,
    ModelList,
    Policy,
    PolicyDecision,
    PolicyList,
    ReplicaHealth,
)
from rollout_gateway.http.errors import ClientGoneError, unknown_model
from rollout_gateway.http.request import SSE_HEADERS
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.policy_feed import PolicyFeed
from rollout_gateway.serving.promotion import Action, Decision, DecisionAnswer, Promotion
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter


@dataclass(eq=False)
class ModelRoutes:
    """Handlers of the routes about models. All raise `ApiError`."""

    _policies: Policies
    _fleet: Fleet
    _router: VersionRouter
    _promotion: Promotion
    _feed: PolicyFeed
    _log_health: LogHealth

    def _visible_names(self, access: Access) -> list[str]:
        return [name for name in self._policies.names() if access.sees(self._router.name(name))]

    async def models(self, request: ControlRequest) -> ModelList:
        """OpenAI's list: names that follow the newest version, and exact versions."""
        return ModelList(data=[Model(id=name) for name in self._visible_names(request.access)])

    async def model(self, request: ControlRequest) -> Model:
        """One of them. A model that the key does not permit is a 404, like one that does not exist."""
        name, names = request.values[0], self._visible_names(request.access)
        known = name in self._policies.models or self._policies.knows(name)
        if not (known and request.access.sees(self._router.name(name))):
            raise unknown_model(name, names)
        return Model(id=name)

    async def policies(self, request: ControlRequest) -> PolicyList:
        return self._policy_list(request.access)

    def _policy_list(self, access: Access) -> PolicyList:
        return PolicyList(data=[self._policy(name) for name in self._policies.models if access.sees(name)])

    def _policy(self, model: str) -> Policy:
        version = self._router.current(model)
        loaded = {v for r in self._fleet.ready() for v in r.loaded if parse_version(v)[0] == model}
        return Policy(
            model=model,
            version=version,
            step=parse_version(version)[1],
            newest=self._policies.newest(model),
            loaded=sorted(loaded, key=lambda v: parse_version(v)[1]),
            refused={v: why for v, why in self._policies.refused.items() if parse_version(v)[0] == model},
            decision=_shown(self._policies.models[model].decided),
        )

    async def watch_policies(self, request: ControlRequest) -> None:
        """Stream events until the client leaves or the gateway stops."""
        http = request.http
        http.start(200, SSE_HEADERS)
        with contextlib.suppress(ClientGoneError), http.cancellation:
            async for event in self._feed.subscribe(self._policy_list(request.access), request.access):
                http.write(event)
                await http.drain()
        http.end()

    async def decide(
        self, request: ControlRequest, *, action: Action, body: type[Decision]
    ) -> DecisionAnswer:
        model = request.values[0]
        request.access.check_model(model)
        return await self._promotion.decide(model, action, request.read(body), request.access.owner)

    async def health(self, request: ControlRequest) -> Health:
        """Always `ok`, since the gateway answers. `serving` says whether calls can be answered.

        A caller with a valid key also sees the inference servers and the versions of its models that they hold."""
        access, trouble = request.access, self._log_health.trouble
        replicas = [
            ReplicaHealth(
                replica=r.name,
                ready=r.ready,
                in_flight=r.load,
                loaded=sorted(v for v in r.loaded if access.sees(self._router.name(v))),
            )
            for r in self._fleet.replicas
        ]
        known = access.operator or access.owner
        return Health(
            serving=bool(self._fleet.ready()) and not trouble,
            log=trouble or "ok",
            replicas=replicas if known else UNSET,
        )


def _shown(decided: PolicyPromoted | None) -> PolicyDecision | None:
    if decided is None:
        return None
    return PolicyDecision(
        action=decided.action, version=decided.version, other=decided.other, percent=decided.percent, by=decided.by,
        reason=decided.reason, at=decided.at,
    )  # fmt: skip
