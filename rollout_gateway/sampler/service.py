"""The sampler agent as a service: one controller for each inference server in `vllm.urls`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from pipeline.config import Config, ConfigError
from pipeline.log.broker import Broker
from pipeline.running import reload
from pipeline.running.service import Ready
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.sampler.adapter_api import Probe
from rollout_gateway.sampler.adapter_files import AdapterFiles
from rollout_gateway.sampler.controller import SamplerContext, ServerController
from rollout_gateway.sampler.gateway_records import GatewayRecords
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.server_key import api_key

log = get_logger("rollout_gateway.sampler")


class _FileCleaner:
    """Deletes the files of unloaded adapters, one adapter late: the files of an adapter are deleted when the next one
    has been unloaded, and only if no server has it loaded then."""

    def __init__(self, files: AdapterFiles, loaded: Callable[[], set[str]]) -> None:
        """`loaded` returns the folders of all loaded adapters."""
        self._files, self._loaded = files, loaded
        self._last = ""
        self._lock = threading.Lock()

    def unloaded(self, folder: str) -> None:
        """Note that a server has unloaded the adapter in `folder`."""
        with self._lock:
            before, self._last = self._last, folder
        if before and before != folder and before not in self._loaded():
            self._files.delete(before)


@dataclass(eq=False)
class _Running:
    """The controller of one server."""

    controller: ServerController
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class _Controllers:
    """Controls the servers that the settings name, also when these change."""

    def __init__(self, context: SamplerContext) -> None:
        self._context, self._settings = context, context.config
        self._running: dict[tuple[str, str], _Running] = {}
        """By the URLs of a server for this process and for gateways."""
        self._files = _FileCleaner(context.files, self._loaded)
        self._changed = anyio.Event()

    def _loaded(self) -> set[str]:
        """Return the folders of all loaded adapters."""
        return {folder for r in list(self._running.values()) for folder in list(r.controller.loaded.values())}

    def wake(self) -> None:
        """Have versions loaded and unloaded now."""
        for running in self._running.values():
            running.controller.work.set()

    async def use(self, config: Config) -> None:
        """Control the servers that `config` names from now on."""
        try:
            check(config)
        except ConfigError as error:
            log.error("the changed settings can't be used; the servers stay as they are", error=str(error))
            return
        self._settings = config
        self._changed.set()

    async def run(self) -> None:
        """Control the servers that the settings name. Never returns."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._changed = anyio.Event()
                urls = self._settings.vllm.urls
                wanted = set(zip(urls, self._settings.sampler.advertise or urls, strict=True))
                removed = [self._running[server] for server in self._running.keys() - wanted]
                for running in removed:
                    running.scope.cancel()
                for (
                    running
                ) in removed:  # else its last write could remove the record of the server's next controller
                    await running.ended.wait()
                for server in wanted - self._running.keys():
                    controller = ServerController(self._context, *server, self._files.unloaded)
                    self._running[server] = _Running(controller)
                    tasks.start_soon(self._run_one, server)
                await self._changed.wait()

    async def _run_one(self, server: tuple[str, str]) -> None:
        running = self._running[server]
        try:
            with running.scope:
                await running.controller.run()
        finally:
            del self._running[server]
            running.ended.set()


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` would not start. Opens and writes nothing."""
    if not config.vllm.urls:
        raise ConfigError("vllm.urls is empty: list the inference servers on this sampler agent's machine")
    Trust(config.signing)
    api_key(config)


async def serve(config: Config, ready: Ready) -> None:
    """Control the inference servers in `vllm.urls` until cancelled, also when the settings file names others.

    `ready` is called once the agent has read the policy versions on the log.
    Waits for servers that are not up yet. Raises `ConfigError` for settings that can't work."""
    check(config)
    trust = Trust(config.signing)
    if not trust.checks:
        log.warning(
            "signatures of checkpoints are not checked: an adapter of any client of the log is loaded",
            setting="signing",
        )
    async with Broker.connect(config.nats, name="sampler") as broker:
        policies = Policies(config.project, (m.name for m in config.models), trust, dead_letters=False)
        await policies.rebuild(broker)
        gateways = GatewayRecords(config.project)
        files = AdapterFiles(config.path(config.sampler.adapters), broker)
        controllers = _Controllers(
            SamplerContext(config, broker, policies, gateways, files, Probe(), api_key(config))
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policies.follow, broker, lambda _: controllers.wake())
            tasks.start_soon(gateways.follow, broker, controllers.wake)
            with reload.listening(controllers.use):
                tasks.start_soon(controllers.run)
                ready(servers=len(config.vllm.urls))
                await anyio.sleep_forever()
