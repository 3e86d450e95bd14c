"""Which version a model's name stands for, decided by people: promote, pin, roll back, split, and follow again.

Each decision is an event, so every gateway replica learns of it and it holds across restarts. A version is loaded before
the decision is published: no call waits for it.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec

from pipeline.events import Event, PolicyPromoted
from pipeline.log.broker import Broker
from pipeline.names import new_id, parse_version, version_name
from rollout_gateway.http.errors import ApiError, unavailable, unknown_model
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import Router

_LOAD_WAIT_S = 60.0

Action = Literal["promote", "rollback", "pin", "split", "follow"]


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/policies/{model}/{action}`."""

    version: str = ""
    """Exact version; `rollback` may leave it out: the one before the present one."""
    other: str = ""
    """`split`: who gets the rest."""
    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0
    """`split`: share of trajectories that goes to `version`."""
    by: str = ""
    """Who decides, on a gateway without keys; elsewhere it is the name of the key, whatever stands here."""
    reason: str = ""
    request: str = ""
    """Idempotency id: the same decision under the same id is one event."""


class Promotion:
    """Takes decisions."""

    def __init__(
        self, project: str, broker: Broker, policies: Policies, fleet: Fleet, router: Router
    ) -> None:
        self._project, self._broker = project, broker
        self._policies, self._fleet, self._router = policies, fleet, router

    async def decide(self, model: str, action: Action, decision: Decision, owner: str = "") -> dict[str, Any]:
        """Check, load, publish. `owner` is the name of the caller's key. Raises `ApiError`."""
        if model not in self._policies.models:
            raise unknown_model(model, list(self._policies.models))
        version, other, percent = decision.version, "", 100.0
        if action == "follow":
            version = ""
        elif action == "rollback" and not version:
            version = self._before(model)
        if action == "split":
            other, percent = decision.other, decision.percent
            await self._load(model, other, "other")
        if action != "follow":
            await self._load(model, version, "version")
        event = PolicyPromoted(
            project=self._project,
            model=model,
            version=version,
            action=action,
            other=other,
            percent=percent,
            by=owner or decision.by,
            reason=decision.reason,
            request=decision.request or new_id("d"),
        )
        ack = await self._broker.publish(event)
        if not ack.duplicate:
            # At once here; the other replicas learn of it from the log.
            self._policies.models[model].decide(
                event, (await self._broker.read_at(PolicyPromoted, ack.seq)).place
            )
            self._fleet.changed()
        return {
            "model": model,
            "action": action,
            "version": self._router.current(model),
            "other": other or None,
        }

    def _before(self, model: str) -> str:
        step = parse_version(self._router.current(model))[1]
        for version in self._policies.models[model].newest_first():
            if parse_version(version)[1] < step and not self._policies.out_of_use(version):
                return version
        if step == 0:
            raise ApiError(
                409, "There is no version before the base.", kind="conflict_error", code="no_version"
            )
        return version_name(model, 0)

    async def _load(self, model: str, version: str, param: str) -> None:
        if not self._policies.offered(version) or parse_version(version)[0] != model:
            error = unknown_model(version, self._policies.names())
            error.param = param
            raise error
        lease = await self._fleet.acquire(
            lambda: self._router.version(version, None), lambda able: able[0], time.monotonic() + _LOAD_WAIT_S
        )
        lease.release()
        if not self._fleet.available(version):
            raise unavailable(f"{version} is not loaded everywhere yet.", "loading", retry_after_s=1)


def described(event: Event) -> dict[str, Any]:
    """A policy event for those who watch."""
    out: dict[str, Any] = msgspec.to_builtins(event)
    keep = (
        "type",
        "model",
        "version",
        "step",
        "action",
        "other",
        "percent",
        "by",
        "reason",
        "replica",
        "probe_delta",
        "at",
    )
    return {name: out[name] for name in keep if name in out}
