"""The gateway as a service: makes its parts, serves, and lets running calls end before it stops.

`pipeline.running.service.main` calls `check` and `serve`. At the start the gateway reads from the log which policy
versions and groups there are; then it follows the log, so that all gateways know the same."""

from __future__ import annotations

import gc
import os
import secrets
import socket
from functools import partial

import anyio

from pipeline.config import Config, ConfigError
from pipeline.events import CheckpointPublished, Event, PolicyLoaded
from pipeline.files import write_once
from pipeline.log.broker import Broker, LogEntry
from pipeline.running.ports import host_and_port, http_url
from pipeline.running.service import Ready
from pipeline.security.server_key import api_key
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.app import App
from rollout_gateway.capture.masking import Masks
from rollout_gateway.capture.registry import Registry
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.server import checked_limits, run_server
from rollout_gateway.outside.providers import Provider
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies

logger = get_logger("rollout_gateway")

_SETTLE_S = 10
"""Seconds that the records of answered calls may take to reach the log when the gateway stops."""


def _listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens at the address. Port 0 takes a free one. Raises `ConfigError` if it
    can't listen there."""
    ipv6 = ":" in host
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=ipv6)
    except OSError as error:
        raise ConfigError(
            f"gateway: can't listen on {host_and_port(host, port)}: {error.strerror}; set gateway.port to a free "
            "port (0: any)"
        ) from error
    listener.setblocking(False)
    return listener


def key_secret(config: Config) -> bytes:
    """Return the secret of trajectory tokens: from the environment variable that the settings name, else from a file in
    the run directory, which the first start makes.

    Raises `ConfigError` if the variable is too short, or the file empty."""
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
    ApiKeys(config.gateway, config.path(config.gateway.keys_file))
    OriginPolicy(config.gateway)
    Trust(config.signing)
    checked_limits(config.gateway.http)
    for table in config.outside:
        Provider(table)
    if config.gateway.key_secret_env:
        key_secret(config)
    api_key(config)


async def _gateway_from_log(
    config: Config, broker: Broker, api_keys: ApiKeys, origins: OriginPolicy, trust: Trust
) -> Gateway:
    """Read from the log what the gateway knows, and make its parts. `_follow_log` continues from there."""
    settings, project = config.gateway, config.project
    policies = Policies(project, (m.name for m in config.models), trust, apprentices=config.apprentices())
    await policies.rebuild(broker)
    # Only the settings of an installation with a trainer have a number for `auto`: without one there is no limit.
    limit = 0 if settings.max_groups_ahead == "auto" else settings.max_groups_ahead
    pacing = Pacing(project, broker, policies.models, limit=limit, forget_s=settings.groups_ahead_s)
    await pacing.rebuild()
    tokens = TrajectoryTokens(key_secret(config), project)
    registry = Registry(broker, project, tokens, pacing, masks=Masks(settings.masks))
    # Before the first call, the order does not matter: the registry knows no run yet, and reads each from the log.
    await registry.note_log_end()
    return Gateway(config, broker, api_keys, origins, policies, pacing, registry)


async def _follow_log(gateway: Gateway) -> None:
    """Apply new events of all gateways, trainer and sampler agents as they arrive. Never returns. Raises
    `LogShrankError`."""

    def policy_changed(recorded: LogEntry[Event]) -> None:
        """Tell the parts of the gateway of an event that `policies` has applied."""
        event = recorded.event
        gateway.members.policies_changed(event)
        if isinstance(event, CheckpointPublished):
            gateway.pacing.mark_done(event.model, event.groups, recorded.place.at)
        if isinstance(event, PolicyLoaded):
            gateway.metrics.loads.inc()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gateway.policies.follow, gateway.broker, policy_changed)
        tasks.start_soon(gateway.registry.follow_completions)
        tasks.start_soon(gateway.registry.log.watch_log_end)
        tasks.start_soon(gateway.pacing.follow)


async def serve(config: Config, ready: Ready) -> None:
    """Serve until cancelled. `ready` is called once the gateway listens and knows the policies.

    Calls wait for inference servers that are not up yet. Raises `ConfigError` for settings that can't work."""
    settings = config.gateway
    api_keys = ApiKeys(settings, config.path(settings.keys_file))
    origins, limits, trust = OriginPolicy(settings), checked_limits(settings.http), Trust(config.signing)
    if not trust.is_enforced:
        logger.warning(
            "signatures of checkpoints are not checked: any client of the log can have its adapter served",
            setting="signing",
        )
    listener = _listen(settings.host, settings.port)
    async with Broker.connect(config.nats, name="gateway") as broker:
        gateway = await _gateway_from_log(config, broker, api_keys, origins, trust)
        app = App(gateway)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gateway.members.run)
                tasks.start_soon(gateway.log_health.run, broker)
                tasks.start_soon(api_keys.watch)
                tasks.start_soon(_follow_log, gateway)
                tasks.start_soon(gateway.shadows.run)
                if gateway.detector is not None:
                    tasks.start_soon(gateway.detector.run)
                async with run_server(app, listener, limits, grace_s=settings.drain_s, cut_off=app.cut_off):
                    _freeze_garbage()
                    ready(url=http_url(*listener.getsockname()[:2]))
                    try:
                        await anyio.sleep_forever()
                    finally:
                        app.stop()
                        gateway.fleet.close()
        finally:
            with anyio.move_on_after(_SETTLE_S, shield=True):
                await gateway.calls.settle()
                await gateway.relay.close()
                await gateway.fleet.disconnect()


def _freeze_garbage() -> None:
    """Keep the objects that exist now out of garbage collections, which then look only at what calls make. Have
    collections run seldom: few of these objects are in cycles, so reference counts free nearly all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
