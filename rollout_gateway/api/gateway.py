"""The parts of a gateway. `rollout_gateway.service` makes and connects them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import Config
from pipeline.log.broker import Broker
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.capture.identity import Identity
from rollout_gateway.capture.registry import Registry
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.errors import ApiError, unknown_model
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.serving.membership import Membership
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.promotion import Promotion
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter


@dataclass(eq=False, kw_only=True)
class Gateway:
    """The objects of a gateway that run beside each other."""

    config: Config
    broker: Broker
    origins: OriginPolicy
    permitted: Permitted
    identity: Identity
    policies: Policies
    registry: Registry
    pacing: Pacing
    fleet: Fleet
    members: Membership
    router: VersionRouter
    promotion: Promotion
    calls: CallHandler
    detector: TrajectoryDetector | None
    """Only with `gateway.detection.enabled`."""
    metrics: Metrics
    log_health: LogHealth

    @property
    def project(self) -> str:
        return self.config.project

    def models_of(self, access: Access) -> list[str]:
        """Return the names of the models that a key may use."""
        return [name for name in self.policies.models if access.sees(name)]

    def unknown_model(self, model: str, access: Access) -> ApiError:
        """Return the 404 about a model that does not exist, or that the key may not use."""
        return unknown_model(model, self.models_of(access))
