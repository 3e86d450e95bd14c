"""The gateway as a service: wires the parts, serves, and on the way out lets running calls end."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
from pathlib import Path

import anyio

from pipeline.config import Config, ConfigError
from pipeline.events import CheckpointPublished, Event, PolicyLoaded, wire_name
from pipeline.log.broker import Broker, Recorded
from pipeline.names import new_id
from pipeline.running.service import Ready
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.access.api_keys import ApiKeys
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.auxiliary import Aside
from rollout_gateway.api.control import Control
from rollout_gateway.api.log_health import LogHealth
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.app import App
from rollout_gateway.capture.chat import ChatHandler
from rollout_gateway.capture.detection import Inference
from rollout_gateway.capture.identity import Identity
from rollout_gateway.capture.trajectories import Registry
from rollout_gateway.http.origins import OriginPolicy
from rollout_gateway.http.pool import Limits
from rollout_gateway.http.server import run_server
from rollout_gateway.serving.adapters import AdapterManager
from rollout_gateway.serving.pacing import Pacing
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.policy_feed import Watchers
from rollout_gateway.serving.promotion import Promotion, described
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import Router

log = get_logger("rollout_gateway")

_SETTLE_S = 10
"""How long records that were begun may take to reach the log when the gateway stops."""


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
    """What trajectory keys are made from: the variable that the settings name, else a file of this run."""
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
        with contextlib.suppress(FileExistsError):  # another replica in this folder was first
            os.link(temporary, path)
        temporary.unlink()
    return path.read_bytes()


def api_key(config: Config) -> str:
    """The key that the inference servers ask for; empty if the settings name none."""
    if not config.vllm.api_key_file:
        return ""
    try:
        key = Path(config.vllm.api_key_file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"vllm.api_key_file: {config.vllm.api_key_file} can't be read") from error
    if not key or not key.isprintable():
        raise ConfigError(
            f"vllm.api_key_file: {config.vllm.api_key_file} holds no key, which is one printable line"
        )
    return key


async def serve(config: Config, ready: Ready) -> None:
    """The service. Ready once it listens and knows the policies; calls wait for inference servers that are not up."""
    if not config.vllm.urls:
        raise ConfigError("vllm.urls: the gateway needs an inference server")
    api_keys = ApiKeys(config.gateway, config.project, config.path(config.gateway.keys_file))
    origins = OriginPolicy(config.gateway)
    trust = Trust(config.signing)
    if not trust.checks:
        log.warning(
            "checkpoints are not checked: whoever can write to the log decides what is served",
            setting="signing",
        )
    listener = _listen(config.gateway.host, config.gateway.port)
    async with Broker.connect(config.nats, name="gateway") as broker:
        policies = Policies(config.project, (m.name for m in config.models), trust)
        await policies.rebuild(broker)
        fleet = Fleet(config.vllm.urls, api_key(config))
        registry = Registry(broker, config.project, TrajectoryTokens(key_secret(config), config.project))
        await registry.begin()
        router = Router(policies, fleet)
        chat = ChatHandler(config.gateway, fleet, registry, router)
        pacing = Pacing(config.project, config.gateway.max_groups_ahead)
        await pacing.begin(broker)
        log_health = LogHealth()
        control = Control(
            config.project, config.gateway, policies, fleet, registry, router, pacing, log_health
        )
        inference = None
        if config.gateway.detection.enabled:
            inference = Inference(config.project, registry, config.gateway)
            chat.on_answered.append(inference.answered)
        identity = Identity(config.project, api_keys, registry, router, inference)
        adapters = AdapterManager(config, broker, policies, fleet, new_id("gw"))
        promotion = Promotion(config.project, broker, policies, fleet, router)
        watchers, metrics = Watchers(), Metrics(fleet, registry)

        def loaded(event: PolicyLoaded) -> None:
            metrics.loads += 1
            watchers.tell("policy.loaded", described(event))

        def changed(recorded: Recorded[Event]) -> None:
            fleet.wake_keepers()
            if isinstance(recorded.event, CheckpointPublished):
                pacing.done(recorded.event.model, recorded.event.groups)
            watchers.tell(wire_name(recorded.event), described(recorded.event))

        adapters.on_loaded.append(loaded)
        aside = Aside(fleet, router, chat)
        app = App(
            chat, control, promotion, identity, router, watchers, metrics, aside, origins, config.gateway
        )
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(adapters.run)
                tg.start_soon(log_health.run, broker)
                tg.start_soon(api_keys.watch)
                tg.start_soon(policies.follow, broker, changed)
                tg.start_soon(registry.heed_completions)
                if config.gateway.max_groups_ahead:
                    tg.start_soon(pacing.follow, broker)
                if inference is not None:
                    tg.start_soon(inference.run)
                async with run_server(
                    app,
                    listener,
                    Limits.from_config(config.gateway),
                    grace_s=config.gateway.drain_s,
                    admit=app.admit,
                    cut_off=app.cut_off,
                ):
                    host, port = listener.getsockname()[:2]
                    # What is there now stays: collections look at calls only, and seldom, since few of them are cycles.
                    gc.collect()
                    gc.freeze()
                    gc.set_threshold(50_000, 20, 20)
                    ready(url=f"http://{host}:{port}")
                    try:
                        await anyio.sleep_forever()
                    finally:
                        app.stop()
                        fleet.close()
                        watchers.close()
        finally:
            with anyio.move_on_after(_SETTLE_S, shield=True):
                await chat.settle()
            for replica in fleet.replicas:
                replica.upstream.close()
