"""The sampler agent as a service: one keeper for each inference server of `vllm.urls`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio

from pipeline.config import Config, ConfigError
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.sampler.adapter_api import Probe
from rollout_gateway.sampler.adapter_files import AdapterFiles
from rollout_gateway.sampler.gateways import Gateways
from rollout_gateway.sampler.keeper import Agent, Keeper
from rollout_gateway.serving.policies import Policies
from rollout_gateway.serving.server_key import api_key

log = get_logger("rollout_gateway.sampler")


class _Files:
    """Deletes the files of an adapter when another one has been unloaded after it and no server has it loaded."""

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
        raise ConfigError("vllm.urls: name the inference servers beside this sampler agent")
    Trust(config.signing)
    api_key(config)


async def serve(config: Config, ready: Ready) -> None:
    """Keep the inference servers of `vllm.urls` until cancelled. `ready` is called once the agent knows the policies.

    It waits for servers that are not up yet. Raises `ConfigError` for settings that can't work."""
    check(config)
    trust = Trust(config.signing)
    if not trust.checks:
        log.warning(
            "signatures of checkpoints are not checked: any client of the log can have its adapter served",
            setting="signing",
        )
    async with Broker.connect(config.nats, name="sampler") as broker:
        policies = Policies(config.project, (m.name for m in config.models), trust, dead_letters=False)
        await policies.rebuild(broker)
        gateways = Gateways(config.project)
        files = AdapterFiles(config.path(config.sampler.adapters), broker)
        agent = Agent(config, broker, policies, gateways, files, Probe(), api_key(config))
        keepers: list[Keeper] = []
        cleaner = _Files(files, lambda: {folder for k in keepers for folder in list(k.loaded.values())})
        advertised = config.sampler.advertise or config.vllm.urls
        for url, public in zip(config.vllm.urls, advertised, strict=True):
            keepers.append(Keeper(agent, url, public, cleaner.unloaded))

        def wake() -> None:
            for keeper in keepers:
                keeper.work.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policies.follow, broker, lambda _: wake())
            tasks.start_soon(gateways.follow, broker, wake)
            for keeper in keepers:
                tasks.start_soon(keeper.run)
            ready(servers=len(keepers))
