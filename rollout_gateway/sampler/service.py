"""The sampler agent as a service: one controller for each inference server in `vllm.urls`."""

from __future__ import annotations

import anyio

from pipeline.config import Config, ConfigError
from pipeline.log.broker import Broker
from pipeline.running.service import Ready
from pipeline.security.server_key import api_key
from pipeline.security.signing import Trust
from pipeline.telemetry.logs import get_logger
from rollout_gateway.sampler.adapter_files import AdapterFiles
from rollout_gateway.sampler.controller import SamplerContext, ServerController
from rollout_gateway.sampler.gateway_records import GatewayRecords
from rollout_gateway.serving.policies import Policies

logger = get_logger("rollout_gateway.sampler")


def check(config: Config) -> None:
    """Raise `ConfigError` for settings with which `serve` can't work. Reads the server's key, and connects to
    nothing."""
    if not config.vllm.urls:
        raise ConfigError("vllm.urls is empty: list the inference servers on this sampler agent's machine")
    # Both raise it.
    Trust(config.signing)
    api_key(config)


async def serve(config: Config, ready: Ready) -> None:
    """Control the inference servers in `vllm.urls` until cancelled. `check` has passed the settings.

    `ready` is called once the agent has read the policy versions on the log.
    Waits for servers that are not up yet."""
    trust = Trust(config.signing)
    if not trust.is_enforced:
        why = "signatures of checkpoints are not checked: an adapter of any client of the log is loaded"
        logger.warning(why, setting="signing")
    async with Broker.connect(config.nats, name="sampler") as broker:
        models, apprentices = (m.name for m in config.models), config.apprentices()
        policies = Policies(config.project, models, trust, apprentices=apprentices, dead_letters=False)
        await policies.rebuild(broker)
        gateways = GatewayRecords(config.project)
        files = AdapterFiles(config.path(config.sampler.adapters), broker)
        context = SamplerContext(config, broker, policies, gateways, files, api_key(config))
        controllers: list[ServerController] = []

        async def delete_unused() -> None:
            """Delete the adapters that no server has loaded."""
            used = {folder for c in controllers for folder in c.folders}
            await files.delete_unused(used, inherited=all(c.server_start for c in controllers))

        def wake() -> None:
            """Have versions loaded and unloaded now."""
            for controller in controllers:
                controller.wake.set()

        urls = config.vllm.urls
        for url, advertised in zip(urls, config.sampler.advertise or urls, strict=True):
            controllers.append(ServerController(context, url, advertised, delete_unused))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(policies.follow, broker, lambda _: wake())
            tasks.start_soon(gateways.follow, broker, wake)
            for controller in controllers:
                tasks.start_soon(controller.run)
            ready(servers=len(controllers))
            await anyio.sleep_forever()
