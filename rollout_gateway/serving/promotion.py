"""Decisions about which version a model name is routed to: promote, roll back, split, or follow the newest
version.

`api.models` has the requests decided here. Each decision is an event on the log, so all gateways apply it
(`policies`) and it survives restarts. A version is loaded before the decision is published, so no call waits for the
load. A decision that depends on the last one is published on the condition that this is still the last: of several
gateways that decide at once, one succeeds, and the others read and decide again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.events import PolicyPromoted, standing_decisions
from pipeline.log.broker import Broker
from pipeline.names import MAX_NAME, check_name, new_id, outside_version, parse_version
from rollout_gateway.http.errors import ApiError, invalid_body, retired_version, unknown_model
from rollout_gateway.serving.idempotency import refuse_different
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet, least_loaded
from rollout_gateway.serving.routing import VersionRouter

_LOAD_WAIT_S = 60.0
"""Seconds that a decision waits until enough servers have loaded its version."""

Action = Literal["promote", "rollback", "split", "follow"]


Version = Annotated[str, Meta(min_length=1)]
RequestId = Annotated[str, Meta(max_length=MAX_NAME)]
"""Idempotency id. A repeated request with the same id is recorded once; a different request with the id is refused."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/policies/{model}/rollback` and `/follow`."""

    by: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Name of the person or program that decides. Ignored if the gateway has API keys: then it is the name of the
    key."""
    reason: Annotated[str, Meta(max_length=4096)] = ""
    request: RequestId = ""


class VersionDecision(Decision, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/policies/{model}/promote`."""

    version: Version
    """Exact version."""
    evidence: Annotated[str, Meta(max_length=65536)] = ""
    """JSON of what the decision rests on; kept as it is."""
    min_logprob: Annotated[float, Meta(le=0, ge=-1e6)] | None = None
    """About an outside model: as in `policy.promoted`."""
    prompt: Annotated[str, Meta(max_length=65536)] = ""
    """System prompt that the version gets in place of `replaces`, the agent's. Not in a split."""
    replaces: Annotated[str, Meta(max_length=65536)] = ""
    after: RequestId = ""
    """Request id of the decision in force, as far as the caller knows. If another one is in force, nothing is
    decided."""


class SplitDecision(VersionDecision, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/policies/{model}/split`."""

    other: Version
    """The version that gets the other trajectories."""
    percent: Annotated[float, Meta(ge=0, le=100)] = 100.0
    """Percentage of trajectories that `version` gets."""


BODIES: dict[Action, type[Decision]] = {
    "promote": VersionDecision,
    "rollback": Decision,
    "split": SplitDecision,
    "follow": Decision,
}
"""The body of each decision."""


@dataclass(eq=False)
class Promotion:
    """Checks and publishes decisions."""

    _project: str
    _broker: Broker
    _policies: Policies
    _fleet: Fleet
    _router: VersionRouter

    async def decide(self, model: str, action: Action, decision: Decision, owner: str = "") -> dict[str, Any]:
        """Check a decision about `model`, load its versions, and publish it. `owner`: the name of the caller's API key.

        Return the answer to the request: `version` is the one that the model's name is routed to now, `other` the one
        that gets the rest in a split.

        Raises `ApiError`: 400 for fields that do not go together, 404 for an unknown model or version, 409 if there is
        no decision to roll back or another one than `after` was made, and 503 if a version is not loaded in time."""
        fields: dict[str, Any] = {"version": "", **msgspec.structs.asdict(decision)}
        fields |= {"by": owner or decision.by, "request": decision.request or new_id("d")}
        expected = fields.pop("after", "")
        self._check(model, action, fields)
        while True:  # once more if another decision was published since this one read the last
            last: int | None = None
            routing: dict[str, Any] = {}
            if action == "rollback":
                routing, last = await self._routing_to_restore(model, fields["request"])
            elif expected:
                last = await self._last_decision(model, expected, fields["request"])
            event = PolicyPromoted(project=self._project, model=model, action=action, **fields | routing)
            for param, version in (("other", event.other), ("version", event.version)):
                if version:
                    await self._wait_until_loaded(model, version, param)
            if await self._publish(event, last):
                return {
                    "model": model,
                    "action": action,
                    "version": self._router.current(model),
                    "other": event.other or None,
                }

    def _check(self, model: str, action: Action, fields: dict[str, Any]) -> None:
        """Raise a 404 `ApiError` for an unknown model, and a 400 one for fields that do not go together."""
        if model not in self._policies.routed:
            raise unknown_model(model, list(self._policies.routed))
        if model in self._policies.models and fields.get("min_logprob") is not None:
            message = f"{model!r} is no outside model: nobody else can answer where its answers are not shown."
            raise invalid_body(message, "min_logprob")
        prompt = fields.get("prompt")
        if bool(prompt) != bool(fields.get("replaces")) or (prompt and action == "split"):
            message = "A prompt needs `replaces`, the agent's prompt in whose place it is put, and goes to all runs."
            raise invalid_body(message, "prompt")
        check_name(fields["request"])

    async def _last_decision(self, model: str, expected: str, request: str) -> int:
        """Return the sequence of the last decision about a model. Raises a 409 `ApiError` unless its request id is
        `expected`, or `request`: then this one is a repetition of it."""
        recorded = await self._broker.read_last(PolicyPromoted, project=self._project, model=model)
        if recorded is None or recorded.event.request not in (expected, request):
            message = f"Another decision about {model} was made since. Look at `GET /v1/policies`, and decide again."
            raise ApiError(409, "decision_changed", message, param="after")
        return recorded.seq

    async def _publish(self, event: PolicyPromoted, last: int | None) -> bool:
        """Publish a decision, if message `last` is still the last decision about its model; `None`: in any case.

        Return false if another decision came first, here or at another gateway. Return true without publishing if the
        log holds this decision: its request is a repetition. Raises `ApiError` as `refuse_different` does."""
        ack = await self._broker.publish(event, after=last, message_id=event.message_id())
        if ack.duplicate:
            stored = (await self._broker.read_at(PolicyPromoted, ack.seq)).event
            if stored.request != event.request:
                return False
            refuse_different(event, stored, "request")
        else:
            # Apply it here at once; other gateways read it from the log.
            self._policies.routed[event.model].decide(event, ack.seq)
            self._fleet.changed()
        return True

    async def _routing_to_restore(self, model: str, request: str) -> tuple[dict[str, Any], int]:
        """Return the routing (`_routing`) that a rollback restores, and the sequence of the last decision. The routing
        is that of the decision before the last one that was not taken back. If there is none, it is empty for a
        policy's name, and the outside model itself for an outside model. For the `request` id of an earlier rollback,
        it is what that restored. Raises a 409 `ApiError` if there is no decision to take back."""
        recorded = await self._broker.read(PolicyPromoted, project=self._project, model=model)
        decisions = [r.event for r in recorded]
        for event in decisions:
            if event.request == request:
                return _routing(event), recorded[-1].seq
        standing = standing_decisions(decisions)
        if not standing:
            message = f"No decision about {model} is left to take back. To serve an old version, promote it."
            raise ApiError(409, "no_decision", message)
        first = {"version": outside_version(model)} if model in self._policies.apprentices else {}
        return _routing(standing[-2]) if len(standing) > 1 else first, recorded[-1].seq

    async def _wait_until_loaded(self, model: str, version: str, param: str) -> None:
        """Wait until enough replicas hold `version`, which a decision about `model` names in the request's field
        `param`. Raises an `ApiError`: 404 if it is no version that can be named, 503 after `_LOAD_WAIT_S`. An outside
        model itself needs no loading."""
        if model in self._policies.apprentices and version == outside_version(model):
            return
        model = self._policies.apprentices.get(model, model)
        if not self._policies.knows(version) or parse_version(version)[0] != model:
            raise unknown_model(version, self._policies.names(model), param)
        if version in self._policies.retired:
            raise retired_version(version, self._policies.versions(model), param)
        deadline = time.monotonic() + _LOAD_WAIT_S
        lease = await self._fleet.acquire(lambda: self._router.resolve(version, None), least_loaded, deadline)
        lease.release()
        if not await self._fleet.until_available(version, deadline):
            message = f"{version} is loaded on too few servers (gateway.replicas.serving_share). Try again."
            raise ApiError(503, "loading", message, retry_after_s=1)


def _routing(event: PolicyPromoted) -> dict[str, Any]:
    """Return the fields of a decision that say who answers."""
    return {name: getattr(event, name) for name in ("version", "other", "percent", "min_logprob", "prompt", "replaces")}
