"""The sampler agent as a service: one controller for each inference server in `vllm.urls`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio

from pipeline.config import Config, ConfigError
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.security.server_key import api_key
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.sampler.adapter_api import Probe
from rollout_gateway.sampler.adapter_files import AdapterFiles
from rollout_gateway.sampler.controller import SamplerContext, ServerController
from rollout_gateway.sampler.gateway_records import GatewayRecords
from rollout_gateway.serving.policies import Policies

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


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` would not start. Opens and writes nothing."""
    if not config.vllm.urls:
        raise ConfigError("vllm.urls is empty: list the inference servers on this sampler agent's machine")
    Trust(config.signing)
    api_key(config)


async def serve(config: Config, ready: Ready) -> None:
    """Control the inference servers in `vllm.urls` until cancelled.

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
        context = SamplerContext(config, broker, policies, gateways, files, Probe(), api_key(config))
        controllers: list[ServerController] = []

        def loaded_folders() -> set[str]:
            return {folder for c in controllers for folder in list(c.loaded.values())}

        def wake() -> None:
            """Have versions loaded and unloaded now."""
            for controller in controllers:
                controller.wake.set()

        cleaner, urls = _FileCleaner(files, loaded_folders), config.vllm.urls
        for url, advertised in zip(urls, config.sampler.advertise or urls, strict=True):
            controllers.append(ServerController(context, url, advertised, cleaner.unloaded))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policies.follow, broker, lambda _: wake())
            tasks.start_soon(gateways.follow, broker, wake)
            for controller in controllers:
                tasks.start_soon(controller.run)
            ready(servers=len(controllers))
            await anyio.sleep_forever()
