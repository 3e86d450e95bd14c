"""The parts of a gateway with their connections, and a request to the control API as its handler gets it.

`service` makes the parts that read the log first, then the `Gateway`, and runs what has to run beside the requests.
`app` gives a `ControlRequest` to the handler of its route (`routes`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from pipeline.config import Config
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.names import new_id
from pipeline.security.server_key import api_key
from rollout_gateway.access.api_keys import Access, ApiKeys
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.capture.identity import CallIdentifier
from rollout_gateway.capture.registry import Registry
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError, unknown_model
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.request import HeaderList, Request
from rollout_gateway.outside.relay import Relay
from rollout_gateway.outside.shadow import Shadows
from rollout_gateway.serving.membership import Membership
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.promotion import Promotion
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter

_T = TypeVar("_T")


class Gateway:
    """The objects of a gateway process, each made once."""

    def __init__(
        self,
        config: Config,
        broker: Broker,
        api_keys: ApiKeys,
        origins: OriginPolicy,
        policies: Policies,
        pacing: Pacing,
        registry: Registry,
    ) -> None:
        """`policies`, `pacing` and `registry` have read the log already, which the others rely on."""
        settings, project = config.gateway, config.project
        self.config, self.broker, self.origins, self.api_keys = config, broker, origins, api_keys
        self.policies, self.pacing, self.registry = policies, pacing, registry
        registry.log.count_calls = api_keys.count_calls
        registry.log.max_run_bytes = settings.max_run_bytes
        self.permitted = Permitted(settings.further_fields, config.vllm.allowed_media_domains)
        self.fleet = Fleet(api_key(config), settings.replicas.serving_share)
        outside = tuple(dict.fromkeys(table.name for table in config.outside))
        self.router = VersionRouter(policies, self.fleet, {m.name: m.base for m in config.models}, outside)
        enabled = settings.detection.enabled
        self.detector = TrajectoryDetector(project, registry, settings) if enabled else None
        self.call_identifier = CallIdentifier(project, api_keys, registry, self.router, self.detector)
        registry.assign = self.router.assign
        self.members = Membership(config, broker, policies, self.fleet, self.router, new_id("gw"))
        self.promotion = Promotion(project, broker, policies, self.fleet, self.router)
        self.calls = CallHandler(settings, self.fleet, self.router, self.detector)
        self.shadows = Shadows(config, self.fleet, self.router, self.permitted)
        self.relay = Relay(config.outside, self.calls, self.shadows)
        self.metrics = Metrics(self.fleet, registry, self.shadows.counts)
        self.log_health = LogHealth()

    @property
    def project(self) -> str:
        return self.config.project

    def models_of(self, access: Access) -> list[str]:
        """Return the names of the models that a key may use, outside models included."""
        return [name for name in (*self.policies.models, *sorted(self.router.outside)) if access.sees(name)]

    def unknown_model(self, model: str, access: Access) -> ApiError:
        """Return the 404 about a model that does not exist, or that the key may not use."""
        return unknown_model(model, self.models_of(access))


@dataclass(eq=False, slots=True)
class ControlRequest:
    """A request to the control API. Its key permits its route, and its body has been read."""

    gateway: Gateway
    http: Request
    access: Access
    values: list[str]
    """Values of the path's parameters, decoded."""

    def read(self, kind: type[_T]) -> _T:
        """The body as `kind`; an empty body is an empty object. Raises an `ApiError` as `read_body`."""
        return read_body(self.http.body or b"{}", kind)

    def charge_runs(self, runs: int) -> None:
        """Count the request as a call of its key for each of so many runs, before any of them is read. Raises a 429
        `ApiError`."""
        self.gateway.api_keys.charge_runs(self.access, runs)

    def reading(self, opened: TrajectoryOpened) -> AbstractAsyncContextManager[Callable[[int], None]]:
        """Count what the block reads of a run as calls of the request's key. The block calls the function that it gets
        with the bytes of each part (`ApiKeys.reading`)."""
        access = self.access
        owner = opened.owner if access.trajectory else access.owner
        return self.gateway.api_keys.reading(owner, feedback_only=access.feedback_only)


@dataclass(eq=False, slots=True)
class RawAnswer:
    """An answer of a handler that is encoded already. Other answers are encoded as JSON, with the route's status."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: HeaderList = ()
