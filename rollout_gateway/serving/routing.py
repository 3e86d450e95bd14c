"""What a name in `model` stands for at this moment."""

from __future__ import annotations

import hashlib

from pipeline.names import version_name
from rollout_gateway.access.api_keys import Access
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.http.errors import ApiError, unknown_model
from rollout_gateway.serving.policies import ModelState, Policies
from rollout_gateway.serving.replicas import Fleet


class Router:
    """Names to versions: exact ones as they are, a model's name to what was promoted or to the newest that serves."""

    def __init__(self, policies: Policies, fleet: Fleet) -> None:
        self._policies, self._fleet = policies, fleet

    def name(self, model: str) -> str:
        """The model that a name or an exact version belongs to."""
        return model if model in self._policies.models else model.rpartition("@")[0]

    def first(self, access: Access) -> str:
        """The model that a request without a name is about: the first that its key is for."""
        models = self._policies.models
        return next((name for name in models if access.sees(name)), next(iter(models)))

    def check(self, model: str, trajectory: Trajectory | None) -> None:
        """Raises a 404 or 400 `ApiError` for a name that no call of this caller can use."""
        name = self.name(model)
        if model not in self._policies.models and not self._policies.knows(model):
            raise unknown_model(model, self._policies.names(trajectory.opened.model if trajectory else ""))
        if trajectory is not None and name != trajectory.opened.model:
            raise ApiError(
                400,
                f"This trajectory was opened for the model {trajectory.opened.model!r}, not {name!r}.",
                code="model_mismatch",
                param="model",
            )

    def version(self, model: str, trajectory: Trajectory | None) -> str:
        """The exact version to ask for now. Raises `ApiError` where it can't be served."""
        self.check(model, trajectory)
        if trajectory is not None and trajectory.opened.pinned:
            version = trajectory.opened.pinned
        elif model in self._policies.models:
            return self.current(model, trajectory.id if trajectory else "")
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

    def current(self, name: str, sticky: str = "") -> str:
        """The version that `name` stands for; `sticky` keeps one caller on one side of a split."""
        model = self._policies.models[name]
        if model.promoted is not None:
            return _side(model, sticky)
        for version in model.newest_first():
            if version not in self._policies.refused and self._fleet.available(version):
                return version
        return version_name(name, 0)


def _side(model: ModelState, sticky: str) -> str:
    promoted = model.promoted
    assert promoted is not None
    if not promoted.other:
        return promoted.version
    # The same trajectory always falls on the same side, and a growing share only moves trajectories one way.
    point = int.from_bytes(hashlib.sha256(sticky.encode()).digest()[:8], "big") / 2**64 * 100
    return promoted.version if point < promoted.percent else promoted.other
