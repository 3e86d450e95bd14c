"""The gateway as a service: connects its parts, serves, and lets running calls end before it stops."""

from __future__ import annotations

import gc
import os
import secrets
import socket
from dataclasses import dataclass
from functools import partial

import anyio

from pipeline.config import Config, ConfigError
from pipeline.events import CheckpointPublished, Event, GroupDiscarded, PolicyLoaded, wire_name
from pipeline.files import write_once
from pipeline.log.broker import Broker, Recorded
from pipeline.names import new_id
from pipeline.running.service import Ready
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.evaluations import EvaluationRoutes
from rollout_gateway.api.groups import GroupRoutes
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.api.models import ModelRoutes
from rollout_gateway.api.routes import Routes
from rollout_gateway.api.tokens import TokenRoutes
from rollout_gateway.api.trajectories import TrajectoryRoutes
from rollout_gateway.app import App
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.capture.identity import Identity
from rollout_gateway.capture.registry import Registry
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.pool import checked_limits
from rollout_gateway.http.server import run_server
from rollout_gateway.serving.membership import Membership
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.policy_feed import PolicyFeed
from rollout_gateway.serving.promotion import Promotion, feed_fields
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter
from rollout_gateway.serving.server_key import api_key

log = get_logger("rollout_gateway")

_SETTLE_S = 10
"""How long the records of answered calls may take to reach the log when the gateway stops."""


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"gateway: can't listen on {host}:{port}: {error.strerror}") from error
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def key_secret(config: Config) -> bytes:
    """The secret of trajectory tokens: from the environment variable that the settings name, else from a file in the
    run directory.

    Raises `ConfigError` if the variable is too short."""
    name = config.gateway.key_secret_env
    if name:
        value = os.environ.get(name, "")
        if len(value) < 16:
            raise ConfigError(f"gateway.key_secret_env: ${name} must hold at least 16 characters")
        return value.encode()
    path = config.path("gateway.secret")
    write_once(path, partial(secrets.token_bytes, 32))
    return path.read_bytes()


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` would not start. Opens and writes nothing."""
    ApiKeys(config.gateway, config.project, config.path(config.gateway.keys_file))
    OriginPolicy(config.gateway)
    Trust(config.signing)
    checked_limits(config.gateway.http)
    if config.gateway.key_secret_env:
        key_secret(config)
    api_key(config)


@dataclass(eq=False)
class _LogState:
    """What the gateway knows from the log."""

    policies: Policies
    registry: Registry
    pacing: Pacing


async def _read_log(config: Config, broker: Broker, trust: Trust) -> _LogState:
    """Read policy versions and groups ahead of the trainer from the log. `_follow_log` continues from there."""
    policies = Policies(config.project, (m.name for m in config.models), trust)
    await policies.rebuild(broker)
    registry = Registry(broker, config.project, TrajectoryTokens(key_secret(config), config.project))
    await registry.mark_position()
    gateway = config.gateway
    ahead = gateway.max_groups_ahead
    pacing = Pacing(
        config.project,
        broker,
        policies.models,
        limit=0 if ahead == "auto" else ahead,
        forget_s=gateway.groups_ahead_s,
    )
    await pacing.rebuild()
    return _LogState(policies, registry, pacing)


@dataclass(eq=False)
class _Parts:
    """The objects of a gateway that run beside each other."""

    app: App
    calls: CallHandler
    fleet: Fleet
    members: Membership
    feed: PolicyFeed
    metrics: Metrics
    log_health: LogHealth
    detector: TrajectoryDetector | None
    """Only with `gateway.detection.enabled`."""


def _connect_parts(
    config: Config, broker: Broker, state: _LogState, api_keys: ApiKeys, origins: OriginPolicy
) -> _Parts:
    gateway, project, policies, registry = config.gateway, config.project, state.policies, state.registry
    fleet = Fleet(api_key(config), gateway.replicas.serving_share)
    router = VersionRouter(policies, fleet)
    members = Membership(config, broker, policies, fleet, router, new_id("gw"))
    feed, metrics, log_health = PolicyFeed(), Metrics(fleet, registry), LogHealth()
    calls = CallHandler(gateway, fleet, router)
    permitted = Permitted(gateway.further_fields, config.vllm.allowed_media_domains)
    detector = TrajectoryDetector(project, registry, gateway) if gateway.detection.enabled else None
    if detector is not None:
        calls.on_answered.append(detector.answered)
    identity = Identity(project, api_keys, registry, router, detector)
    promotion = Promotion(project, broker, policies, fleet, router)
    trajectories = TrajectoryRoutes(
        project, gateway, config.trainer, policies, registry, router, state.pacing, origins
    )
    control = Routes(
        metrics,
        trajectories,
        GroupRoutes(broker, registry, policies, trajectories),
        ModelRoutes(policies, fleet, router, promotion, feed, log_health),
        EvaluationRoutes(project, broker, registry, policies),
        TokenRoutes(fleet, router, permitted),
    )
    app = App(calls, control, identity, router, metrics, origins, gateway, permitted)
    return _Parts(app, calls, fleet, members, feed, metrics, log_health, detector)


async def _follow_log(broker: Broker, state: _LogState, parts: _Parts) -> None:
    """Apply new events as they arrive, and send those about versions to the feed. Never returns. Raises
    `LogShrankError`."""
    feed = parts.feed

    def changed(recorded: Recorded[Event]) -> None:
        event = recorded.event
        parts.members.policies_changed(event)
        if isinstance(event, CheckpointPublished):
            state.pacing.done(event.model, event.groups, recorded.place.at)
        parts.metrics.loads += isinstance(event, PolicyLoaded)
        feed.broadcast(wire_name(event), feed_fields(event))

    def discarded(event: GroupDiscarded) -> None:
        feed.broadcast(wire_name(event), feed_fields(event))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(state.policies.follow, broker, changed)
        tasks.start_soon(state.registry.follow_completions)
        tasks.start_soon(state.registry.log.until_shrunk)
        tasks.start_soon(state.pacing.follow, discarded)


async def serve(config: Config, ready: Ready) -> None:
    """Serve until cancelled. `ready` is called once the gateway listens and knows the policies.

    Calls wait for inference servers that are not up yet. Raises `ConfigError` for settings that can't work."""
    gateway = config.gateway
    api_keys = ApiKeys(gateway, config.project, config.path(gateway.keys_file))
    origins, limits, trust = OriginPolicy(gateway), checked_limits(gateway.http), Trust(config.signing)
    if not trust.checks:
        log.warning(
            "signatures of checkpoints are not checked: any client of the log can have its adapter served",
            setting="signing",
        )
    listener = _listen(gateway.host, gateway.port)
    async with Broker.connect(config.nats, name="gateway") as broker:
        state = await _read_log(config, broker, trust)
        parts = _connect_parts(config, broker, state, api_keys, origins)
        app = parts.app
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parts.members.run)
                tasks.start_soon(parts.log_health.run, broker)
                tasks.start_soon(api_keys.watch)
                tasks.start_soon(_follow_log, broker, state, parts)
                if parts.detector is not None:
                    tasks.start_soon(parts.detector.run)
                async with run_server(
                    app, listener, limits, grace_s=gateway.drain_s, admit=app.admit, cut_off=app.cut_off
                ):
                    _freeze_garbage()
                    ready(url=_url(listener))
                    try:
                        await anyio.sleep_forever()
                    finally:
                        app.stop()
                        parts.fleet.close()
                        parts.feed.close()
        finally:
            with anyio.move_on_after(_SETTLE_S, shield=True):
                await parts.calls.settle()
            parts.fleet.disconnect()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


def _freeze_garbage() -> None:
    """Keep the objects that exist now out of garbage collections, which then look at those of calls only. They are
    seldom, because few of these are in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
