"""Handlers about models, their versions, decisions about them, and the gateway's health and metrics. All raise
`ApiError`. A model that a key may not use (`Access.sees`) looks as if it did not exist."""

from __future__ import annotations

from typing import Any

from pipeline.names import is_outside, parse_version
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway, RawAnswer
from rollout_gateway.api.metrics import CONTENT_TYPE
from rollout_gateway.http.errors import unknown_model
from rollout_gateway.serving.promotion import BODIES, Action

_DECISION_FIELDS = ("action", "version", "other", "percent", "min_logprob", "by", "reason", "at")
"""Fields of a decision that are told."""
_OPERATOR_FIELDS = ("request", "evidence")
"""Fields of a decision that operators are told, too."""


def _visible_names(gateway: Gateway, access: Access) -> list[str]:
    """Return the names that a key may put into a call's `model`: models, exact versions and outside models."""
    names = (*gateway.policies.names(), *sorted(gateway.router.outside))
    return [name for name in names if access.sees(gateway.router.name(name))]


def _model_object(gateway: Gateway, name: str) -> dict[str, Any]:
    """Return OpenAI's object for the model or version `name`."""
    owner = "outside" if name in gateway.router.outside else "journeywork"
    return {"id": name, "object": "model", "created": 0, "owned_by": owner}


async def get_models(request: ControlRequest) -> dict[str, Any]:
    """`GET /v1/models`: OpenAI's list of the names that calls may use, those of models and of exact versions."""
    names = _visible_names(request.gateway, request.access)
    return {"object": "list", "data": [_model_object(request.gateway, name) for name in names]}


async def get_model(request: ControlRequest) -> dict[str, Any]:
    """`GET /v1/models/{model}`: one object of the list of `get_models`, or of a version that is no longer listed and
    still answers the calls that use it. A model that the key does not permit is a 404, like one that does not
    exist."""
    gateway, access, (name,) = request.gateway, request.access, request.values
    names = _visible_names(gateway, access)
    if name in names or (gateway.policies.knows(name) and access.sees(gateway.router.name(name))):
        return _model_object(gateway, name)
    raise unknown_model(name, names)


async def get_policies(request: ControlRequest) -> dict[str, Any]:
    """`GET /v1/policies`: the version that each model's name is routed to, and why."""
    gateway, access = request.gateway, request.access
    names = [name for name in gateway.policies.routed if access.sees(name)]
    return {"data": [_routing_of(gateway, name, access) for name in names]}


def _routing_of(gateway: Gateway, model: str, access: Access) -> dict[str, Any]:
    """Return the item of `GET /v1/policies` about a policy's name, or about an outside model that has an apprentice."""
    policies, version = gateway.policies, gateway.router.current(model)
    decided = policies.routed[model].decided
    trained = policies.apprentices.get(model, model)
    loaded = {v for r in gateway.fleet.ready_replicas() for v in r.loaded if parse_version(v)[0] == trained}
    fields = _DECISION_FIELDS + (_OPERATOR_FIELDS if access.operator else ())
    policy: dict[str, Any] = {
        "model": model,
        "apprentice": policies.apprentices.get(model),
        "version": version,
        "step": -1 if is_outside(version) else parse_version(version)[1],
        "newest": policies.newest(trained),
        "loaded": sorted(loaded, key=lambda v: parse_version(v)[1]),
        "refused": {v: why for v, why in policies.refused.items() if parse_version(v)[0] == trained},
        "decision": {name: getattr(decided, name) for name in fields} if decided else None,
        "prompt": (decided.prompt_id if decided else "") or None,
    }
    if access.sees(trained):
        return policy
    # The key may use the outside model only: its apprentice and who answers are not told.
    policy |= dict.fromkeys(("apprentice", "version", "step", "newest")) | {"loaded": [], "refused": {}}
    hidden = dict.fromkeys(("version", "other", "reason"))
    return policy | {"decision": policy["decision"] and {**policy["decision"], **hidden}}


async def decide(request: ControlRequest, action: Action) -> dict[str, Any]:
    """Change the version that a model's name is routed to: `POST /v1/policies/{model}/{action}`."""
    (model,) = request.values
    request.access.check_model(model)
    decision = request.read(BODIES[action])
    return await request.gateway.promotion.decide(model, action, decision, request.access.owner)


async def get_health(request: ControlRequest) -> dict[str, Any]:
    """`GET /health`: `status` is always `ok`, since the gateway answers. `serving` says whether calls can be answered,
    `log` why the log takes no writes. The state of each inference server is among the metrics."""
    ready, trouble = request.gateway.fleet.ready_replicas(), request.gateway.log_health.trouble
    return {"status": "ok", "serving": bool(ready) and not trouble, "log": trouble or "ok"}


async def get_metrics(request: ControlRequest) -> RawAnswer:
    """`GET /metrics`: the gateway's metrics in Prometheus' text format."""
    return RawAnswer(200, request.gateway.metrics.text(), CONTENT_TYPE)
