"""The gateway as a service: connects its parts, serves, and lets running calls end before it stops."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import secrets
import socket
from collections.abc import Sequence

import anyio

from pipeline.config import Config, ConfigError, with_values
from pipeline.events import CheckpointPublished, Event, GroupDiscarded, PolicyLoaded, wire_name
from pipeline.log.broker import Broker, Recorded
from pipeline.names import new_id
from pipeline.running.service import Ready
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.auxiliary import AuxiliaryRoutes
from rollout_gateway.api.evaluations import EvaluationRoutes
from rollout_gateway.api.groups import GroupRoutes
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.api.models import ModelRoutes
from rollout_gateway.api.trajectories import TrajectoryRoutes
from rollout_gateway.app import App
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.handler import CallHandler
from rollout_gateway.capture.identity import Identity
from rollout_gateway.capture.registry import Registry
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
from rollout_gateway.workers.group import WorkerGroup
from rollout_gateway.workers.owner import Owner

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
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        temporary.touch(0o600)
        temporary.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another replica in this folder made it first
            os.link(temporary, path)
        temporary.unlink()
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


async def serve(config: Config, ready: Ready, workers: WorkerGroup, command: Sequence[str]) -> None:
    """Serve until cancelled, in this process or, with `gateway.workers`, in several. `ready` is called once the gateway
    listens and knows the policies.

    `workers`: this process's place if it is a worker. `command` starts a gateway with these settings. Calls wait for
    inference servers that are not up yet. Raises `ConfigError` for settings that can't work."""
    if config.gateway.workers > 1 and not workers.number:
        check(config)
        with _listen(config.gateway.host, config.gateway.port) as listener:
            await Owner(config, listener, command).run(ready, _url(listener))
    else:
        await _serve(share_limits(config), ready, workers)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


def share_limits(config: Config) -> Config:
    """Return the settings of one worker: its part of the limits that hold for all workers together."""
    gateway, workers = config.gateway, config.gateway.workers
    part = {
        "max_calls": math.ceil(gateway.max_calls / workers),
        "http.max_connections": math.ceil(gateway.http.max_connections / workers),
        "http.max_buffered_bytes": max(
            gateway.http.max_body_bytes, gateway.http.max_buffered_bytes // workers
        ),
    }
    return with_values(config, {f"gateway.{name}": value for name, value in part.items()})


async def _serve(config: Config, ready: Ready, workers: WorkerGroup) -> None:
    """Serve in this process: the connections that the owner of the port hands over, or those of a port of its own."""
    api_keys = ApiKeys(config.gateway, config.project, config.path(config.gateway.keys_file))
    origins = OriginPolicy(config.gateway)
    trust = Trust(config.signing)
    if not trust.checks:
        log.warning(
            "signatures of checkpoints are not checked: any client of the log can have its adapter served",
            setting="signing",
        )
    listener = workers.connections or _listen(config.gateway.host, config.gateway.port)
    facts: dict[str, str | int] = (
        {"url": _url(listener)} if isinstance(listener, socket.socket) else {"worker": workers.number}
    )
    async with Broker.connect(config.nats, name="gateway") as broker:
        policies = Policies(config.project, (m.name for m in config.models), trust)
        await policies.rebuild(broker)
        fleet = Fleet(api_key(config), config.gateway.replicas.serving_share)
        router = VersionRouter(policies, fleet)
        registry = Registry(broker, config.project, TrajectoryTokens(key_secret(config), config.project))
        await registry.mark_position()
        pacing = Pacing(
            config.project,
            broker,
            policies.models,
            limit=config.gateway.max_groups_ahead,
            forget_s=config.gateway.groups_ahead_s,
        )
        await pacing.rebuild()
        members = Membership(config, broker, policies, fleet, router, new_id("gw"))
        promotion = Promotion(config.project, broker, policies, fleet, router)
        feed, metrics, log_health = PolicyFeed(), Metrics(fleet, registry, workers), LogHealth()
        calls = CallHandler(config.gateway, fleet, router)
        detector = None
        if config.gateway.detection.enabled:
            detector = TrajectoryDetector(config.project, registry, config.gateway)
            calls.on_answered.append(detector.answered)
        identity = Identity(config.project, api_keys, registry, router, detector)
        trajectories = TrajectoryRoutes(
            config.project, config.gateway, policies, registry, router, pacing, origins, workers
        )
        controllers = (
            trajectories,
            GroupRoutes(broker, registry, policies, trajectories),
            ModelRoutes(policies, fleet, router, promotion, feed, log_health, workers),
            EvaluationRoutes(config.project, broker, policies),
            AuxiliaryRoutes(fleet, router, identity),
        )
        app = App(calls, controllers, identity, router, metrics, origins, config.gateway)

        def changed(recorded: Recorded[Event]) -> None:
            event = recorded.event
            members.policies_changed(event)
            if isinstance(event, CheckpointPublished):
                pacing.done(event.model, event.groups, recorded.place.at)
            metrics.loads += isinstance(event, PolicyLoaded)
            feed.broadcast(wire_name(event), feed_fields(event))

        def discarded(event: GroupDiscarded) -> None:
            feed.broadcast(wire_name(event), feed_fields(event))

        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(workers.run)
                tg.start_soon(members.run)
                tg.start_soon(log_health.run, broker)
                tg.start_soon(api_keys.watch)
                tg.start_soon(policies.follow, broker, changed)
                tg.start_soon(registry.follow_completions)
                tg.start_soon(pacing.follow, discarded)
                if detector is not None:
                    tg.start_soon(detector.run)
                async with run_server(
                    app,
                    listener,
                    checked_limits(config.gateway.http),
                    grace_s=config.gateway.drain_s,
                    admit=app.admit,
                    cut_off=app.cut_off,
                ):
                    # Objects that exist now stay. Collections look at those of calls only, and seldom: few of them are
                    # in cycles.
                    gc.collect()
                    gc.freeze()
                    gc.set_threshold(50_000, 20, 20)
                    ready(**facts)
                    try:
                        await anyio.sleep_forever()
                    finally:
                        app.stop()
                        fleet.close()
                        feed.close()
        finally:
            with anyio.move_on_after(_SETTLE_S, shield=True):
                await calls.settle()
            fleet.disconnect()
