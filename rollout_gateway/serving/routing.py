"""Resolves the model name in a call to the exact policy version that answers it.

`capture.dispatch` asks for every call, again whenever a server or a decision changes. An "outside model" is a
provider's; where a policy, its "apprentice", may answer in its place it is that policy's "master". An "opening" is the
event that opened the trajectory of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from pipeline.events import PolicyPromoted, TrajectoryOpened
from pipeline.names import is_base_version, is_outside, is_version, outside_version, split_point, version_name
from rollout_gateway.http.errors import ApiError, unknown_model
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet


class VersionRouter:
    """Resolves names.

    An exact version resolves to itself; a model name to its promoted version, or else to the newest version that enough
    replicas hold (`Fleet.available`). Without a decision it never goes back to an older version: if no replica holds
    the version any more, calls wait until one does. The name of a branch resolves to its newest version, which is
    loaded when a call asks for it."""

    def __init__(
        self, policies: Policies, fleet: Fleet, bases: Mapping[str, str] | None = None, outside: Collection[str] = ()
    ) -> None:
        """`policies` has read the log: a model name begins at the newest version that any server has loaded, which
        other gateways may have served already. `bases` holds the base of each model; it is a name of `<model>@0`.
        `outside`: names of outside models, which are known here and have no version."""
        self._policies, self._fleet, self.outside = policies, fleet, frozenset(outside)
        self._bases = {
            base: version_name(model, 0)
            for model, base in (bases or {}).items()
            if base and base not in policies.models
        }
        self._newest_resolved = {model: policies.newest_loaded_anywhere(model) for model in policies.models}
        """The newest version that each model name has resolved to; empty if there is none."""

    def name(self, model: str) -> str:
        """Return the model name of `model`, which is a model name, an exact version or a base."""
        model = self._bases.get(model, model)
        return model if model in self.outside or self._policies.state(model) is not None else model.rpartition("@")[0]

    def check(self, model: str, opening: TrajectoryOpened | None) -> None:
        """Check that `model` is a known model name or version, and belongs to the model of the trajectory.

        `opening`: the opening event of the trajectory that the call belongs to, if any. Raises a 404 `ApiError` for an
        unknown name, and a 400 `ApiError` if the trajectory was opened for another model. An outside model may answer
        calls of any trajectory."""
        if model in self.outside:
            return
        model = self._bases.get(model, model)
        if self._policies.state(model) is None and not self._policies.knows(model):
            raise unknown_model(model, self._names(opening))
        if opening is not None and self.name(model) != opening.model:
            raise _mismatch(opening, self.name(model))

    def check_agents_name(self, model: str, opening: TrajectoryOpened) -> None:
        """Check that an agent's call of a run that a decision gave to an apprentice names an outside model, not the
        apprentice: it would get answers that are to be held back (`min_logprob`). Raises a 400 `ApiError`."""
        if opening.asked and opening.asked != opening.model and model not in self.outside:
            raise _mismatch(opening, self.name(model))

    def _names(self, opening: TrajectoryOpened | None) -> list[str]:
        """Return the names that a call of this opening's run may use, for an error message. For a run of an outside
        model it is that model's name alone: the run's key may not use the apprentice's."""
        if opening is not None and opening.named in self.outside:
            return [opening.named]
        return self._policies.names(opening.model if opening else "")

    def resolve(self, model: str, opening: TrajectoryOpened | None) -> str:
        """Return the exact version that answers a call now.

        `model` is the name in the call, `opening` the opening event of its trajectory, if any. A pinned trajectory gets
        its pinned version, even if the call names another one. A pinned version of this model that is not known here
        is returned as well: the call then waits for it, because another gateway may have read its checkpoint first.
        Without a pin, an exact version is returned as it is, and a model name as `current` resolves it.

        Raises as `check` does, a 404 `ApiError` if the pin is no version of the trajectory's model, and a 409
        `ApiError` if the gateway refuses to serve the version because its adapter failed a check, even if the version
        is promoted."""
        self.refuse_outside(model)
        model = self._bases.get(model, model)
        self.check(model, opening)
        if opening is not None and opening.pinned:
            version = opening.pinned
            # A gateway checks the pin of a request that opens a trajectory. An opening read from the log may be of
            # any program that can write there.
            if not is_version(version) or self.name(version) != opening.model:
                raise unknown_model(version, self._names(opening))
        elif model in self._policies.models:
            promoted = self._policies.models[model].promoted
            run = opening.trajectory if opening else ""
            version = _version_in_split(promoted, run) if promoted else self.current(model)
        else:
            version = self._policies.newest(model, ()) if model in self._policies.branches else model
        if version in self._policies.refused:
            message = f"{version} is not served because its adapter failed a check: {self._policies.refused[version]}."
            raise ApiError(409, "version_refused", message, param="model")
        return version

    def assign(self, opened: TrajectoryOpened) -> TrajectoryOpened:
        """Decide who answers a run that is about to be opened for an outside model: return its opening, with the
        apprentice as its model if the decision in force says so, and the outside model as `asked`. Unchanged if there
        was no decision.

        The whole run keeps its model. All runs of a group get the same one, as they are compared with each other; if a
        decision comes between their openings, those of each model are a group of their own."""
        state = self._policies.routed.get(opened.model)
        if state is None or state.decided is None or opened.model not in self._policies.apprentices or opened.pinned:
            return opened
        decision, name = state.promoted, opened.model
        version = "" if decision is None else _version_in_split(decision, opened.group or opened.trajectory)
        if is_outside(version):
            return msgspec.structs.replace(opened, asked=name)
        least = None if decision is None else decision.min_logprob
        apprentice = self._policies.apprentices[name]
        return msgspec.structs.replace(opened, asked=name, model=apprentice, pinned=version, min_logprob=least)

    def has_prompts(self) -> bool:
        """Return whether a decision in force has a prompt: if not, no call needs to be read for `prompt_for`."""
        return any(s.promoted is not None and s.promoted.prompt for s in self._policies.routed.values())

    def prompt_for(self, model: str, opening: TrajectoryOpened | None) -> PolicyPromoted | None:
        """Return the decision whose prompt a call gets that names `model`; `None` if none has one. Exact versions, and
        runs that another decision or their client gave to a version, get none."""
        state = self._policies.routed.get(model)
        decision = state.promoted if state is not None else None
        if decision is None or not decision.prompt:
            return None
        if opening is None:
            return decision
        if opening.named != model:
            return None
        if opening.pinned and not opening.asked:  # its client pinned it
            return None
        version = outside_version(model) if opening.model in self.outside else opening.pinned
        return decision if version in ("", decision.version) else None

    def refuse_outside(self, model: str) -> None:
        """Raise a 400 `ApiError` if `model` is an outside model, which no inference server here can be asked about."""
        if model in self.outside:
            message = f"{model!r} is a provider's model: it takes model calls, and nothing that needs its tokens."
            raise ApiError(400, "outside_model", message, param="model")

    def current(self, model: str) -> str:
        """Return the version that the model name `model` resolves to; in an A/B split, the one that the decision calls
        `version`. Without a decision, remember the version: the name resolves to no older one later."""
        state = self._policies.routed[model]
        if state.promoted is not None:
            return state.promoted.version
        if model in self._policies.apprentices:  # the outside model answers itself until a decision is made
            return outside_version(model) if state.decided is None else self.current(self._policies.apprentices[model])
        for version in state.newest_first():
            if version in self._policies.refused:
                continue
            if version == self._newest_resolved[model] or self._fleet.available(version):
                self._newest_resolved[model] = version
                return version
        return version_name(model, 0)

    def newest_loaded(self, model: str) -> str:
        """Return the newest version of the model that enough servers hold, whatever the model name resolves to."""
        state = self._policies.models[model]
        usable = (v for v in state.newest_first() if v not in self._policies.refused and self._fleet.available(v))
        return next(usable, version_name(model, 0))

    def served_versions(self) -> tuple[str, ...]:
        """Return the versions that the model names resolve to, which sampler agents must keep loaded. Base versions,
        which are always loaded, are left out."""
        models = self._policies.models.items()
        undecided = [self.current(model) for model, state in models if state.promoted is None]
        return tuple(v for v in (*undecided, *self._policies.decided_versions()) if not is_base_version(v))


def _mismatch(opening: TrajectoryOpened, model: str) -> ApiError:
    """Return the 400 for a call of a trajectory that names `model`, for which the trajectory was not opened."""
    message = f"This trajectory was opened for the model {opening.named!r}, not {model!r}."
    return ApiError(400, "model_mismatch", message, param="model")


def _version_in_split(promoted: PolicyPromoted, trajectory: str) -> str:
    """Return the version that a decision gives to a trajectory. In an A/B split, the same id always gets the same
    version."""
    if not promoted.other:
        return promoted.version
    # Raising `percent` only moves trajectories from `other` to `version`.
    return promoted.version if split_point(trajectory) < promoted.percent else promoted.other
