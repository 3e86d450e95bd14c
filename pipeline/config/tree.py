"""The whole tree of settings: `Config`, its sections, and the models that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pipeline.config.gateway import GatewayConfig
from pipeline.config.judge import JudgeConfig
from pipeline.config.nats import NatsConfig
from pipeline.config.overrides import convert, merged
from pipeline.config.retention import RetentionConfig
from pipeline.config.signing import SigningConfig
from pipeline.config.store import StoreConfig
from pipeline.config.supervisor import SupervisorConfig
from pipeline.config.telemetry import TelemetryConfig
from pipeline.config.trainer import TrainerConfig
from pipeline.config.types import Section
from pipeline.config.vllm import VllmConfig
from pipeline.errors import ConfigError

PROCESSES = ("nats", "vllm", "gateway", "judge", "trainer", "store", "telemetry")
"""Everything that `journeyman up` may start."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """One trainable policy."""

    name: str = "policy"
    """Serving name: what agents put into `model`."""
    base: str = ""
    """Folder or hub name of the base model."""
    trainer: dict[str, Any] = {}
    """Settings of `[trainer]` that differ for this model."""


class Config(Section, frozen=True, kw_only=True):
    """Everything."""

    project: str = "default"
    run_dir: str = "runs/default"
    log_level: str = "INFO"
    nats: NatsConfig = NatsConfig()
    vllm: VllmConfig = VllmConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    gateway: GatewayConfig = GatewayConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    retention: RetentionConfig = RetentionConfig()
    judge: JudgeConfig = JudgeConfig()
    trainer: TrainerConfig = TrainerConfig()
    store: StoreConfig = StoreConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    signing: SigningConfig = SigningConfig()
    environment: dict[str, tuple[str, ...]] = {}
    """Further environment variables that `journeyman up` passes on, by process (`nats`, `vllm`, `gateway`, `judge`, `trainer`,
    `store`, `telemetry`): names, or beginnings of names with a `*` at the end. docs/security.md says what each gets anyway."""

    def path(self, *parts: str) -> Path:
        """A path under the run directory; absolute parts stand for themselves."""
        return Path(self.run_dir).joinpath(*parts)

    def trainer_of(self, model: ModelConfig) -> TrainerConfig:
        """`[trainer]` with what the model's own table says otherwise."""
        try:
            return convert(merged(msgspec.to_builtins(self.trainer), model.trainer), TrainerConfig, "trainer")
        except ConfigError as error:
            raise ConfigError(f"models: trainer of {model.name}: {error}") from error

    def model(self, name: str) -> ModelConfig:
        for model in self.models:
            if model.name == name:
                return model
        raise ConfigError(
            f"no model {name!r} is configured; there are: {', '.join(m.name for m in self.models)}"
        )
