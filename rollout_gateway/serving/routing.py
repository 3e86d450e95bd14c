"""Which exact version answers a call that names a model."""

from __future__ import annotations

import hashlib

from pipeline.events import PolicyPromoted, TrajectoryOpened
from pipeline.names import version_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.http.errors import ApiError, unknown_model
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.replicas import Fleet


class VersionRouter:
    """Resolves names: an exact version stays, a model's name gives the promoted version or the newest one that
    serves."""

    def __init__(self, policies: Policies, fleet: Fleet) -> None:
        self._policies, self._fleet = policies, fleet

    def name(self, model: str) -> str:
        """The model that a name or an exact version belongs to."""
        return model if model in self._policies.models else model.rpartition("@")[0]

    def default(self, access: Access) -> str:
        """The model of a request that names none: the first that the key permits."""
        models = self._policies.models
        return next((name for name in models if access.sees(name)), next(iter(models)))

    def check(self, model: str, opened: TrajectoryOpened | None) -> None:
        """Raises a 404 `ApiError` for an unknown name, and a 400 one for a name of another model than the trajectory's.

        `opened`: the opening of the trajectory that the call belongs to, if any."""
        if model not in self._policies.models and not self._policies.knows(model):
            raise unknown_model(model, self._policies.names(opened.model if opened else ""))
        if opened is not None and self.name(model) != opened.model:
            raise ApiError(
                400,
                f"This trajectory was opened for the model {opened.model!r}, not {self.name(model)!r}.",
                code="model_mismatch",
                param="model",
            )

    def version(self, model: str, opened: TrajectoryOpened | None) -> str:
        """The exact version that answers now: the trajectory's pinned one, else the version that `model` is routed to.

        Raises as `check` does, and a 409 `ApiError` if the version was refused."""
        self.check(model, opened)
        if opened is not None and opened.pinned:
            version = opened.pinned
        elif model in self._policies.models:
            return self.current(model, opened.trajectory if opened else "")
        else:
            version = model
        if version in self._policies.refused:
            raise ApiError(
                409,
                f"{version} can't be served: {self._policies.refused[version]}.",
                kind="conflict_error",
                code="version_refused",
                param="model",
            )
        return version

    def current(self, model: str, trajectory: str = "") -> str:
        """The version that the name `model` is routed to. A trajectory keeps its side of a split."""
        state = self._policies.models[model]
        if state.promoted is not None:
            return _side(state.promoted, trajectory)
        for version in state.newest_first():
            if version not in self._policies.refused and self._fleet.available(version):
                return version
        return version_name(model, 0)


def _side(promoted: PolicyPromoted, trajectory: str) -> str:
    if not promoted.other:
        return promoted.version
    # A trajectory always falls on the same side, and a growing share moves trajectories in one direction only.
    point = int.from_bytes(hashlib.sha256(trajectory.encode()).digest()[:8], "big") / 2**64 * 100
    return promoted.version if point < promoted.percent else promoted.other
