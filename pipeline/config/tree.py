"""The whole tree of settings: `Config`, its sections, and the models that it names.

`Config` is what a settings file holds. Each field is a section (a table of the file), a list of tables such as
`[[models]]`, or a setting of the whole installation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeline.config import sections
from pipeline.config.alarms import AlarmsConfig
from pipeline.config.gateway import GatewayConfig
from pipeline.config.judge import FeedbackConfig, JudgeConfig, TeacherConfig
from pipeline.config.outside import OutsideConfig
from pipeline.config.overrides import convert, merged
from pipeline.config.trainer import TrainerConfig
from pipeline.config.types import Section
from pipeline.errors import ConfigError
from pipeline.names import is_outside, outside_model

PROCESSES = ("nats", "vllm", "gateway", "sampler", "judge", "trainer", "store", "ui", "telemetry")
"""Everything that `journeywork up` may start."""
_SHARED = frozenset(("branch", "checkpoints", "processes", "start_timeout_s"))
"""Settings of `[trainer]` that are read before there is a model, once for all of them."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """One trainable policy."""

    name: str = "policy"
    """Serving name: the value of `model` in requests."""
    base: str = ""
    """Folder of the base model, or its name on the Hugging Face hub. In requests it is a name of `<name>@0`."""
    start: str = ""
    """What training begins with, while the project has no version of this model: the folder of a PEFT adapter, which
    becomes step 1, or a version of a lake, which keeps its step and its optimizer. A version is written as
    `<lake>#<model>@<step>`, with `<branch>/` or `<project>/<branch>/` before the model if its branch is not `main` or
    its project is another one, and a slash within a name as `%2F`; `<lake>` is a run directory, a `store.dir`, or
    `s3://<bucket>/<prefix>`. Empty: a fresh adapter. A merged model is a `base`."""
    trainer: dict[str, Any] = {}
    """Settings of `[trainer]` that differ for this model, in the same tables."""


class Config(Section, frozen=True, kw_only=True):
    """The whole tree of settings."""

    project: str = "default"
    """Namespace of trajectories, groups and versions on the log."""
    run_dir: str = "runs/default"
    """Folder of the installation: logs, state, keys, checkpoints and history."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """The least level of the lines in the services' logs."""
    nats: sections.NatsConfig = sections.NatsConfig()
    vllm: sections.VllmConfig = sections.VllmConfig()
    sampler: sections.SamplerConfig = sections.SamplerConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    outside: tuple[OutsideConfig, ...] = ()
    """Models of providers that the gateway answers with (docs/gateway.md)."""
    gateway: GatewayConfig = GatewayConfig()
    supervisor: sections.SupervisorConfig = sections.SupervisorConfig()
    retention: sections.RetentionConfig = sections.RetentionConfig()
    judge: JudgeConfig = JudgeConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    teacher: TeacherConfig = TeacherConfig()
    trainer: TrainerConfig = TrainerConfig()
    store: sections.StoreConfig = sections.StoreConfig()
    budget: sections.BudgetConfig = sections.BudgetConfig()
    ui: sections.UiConfig = sections.UiConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    telemetry: sections.TelemetryConfig = sections.TelemetryConfig()
    signing: sections.SigningConfig = sections.SigningConfig()
    environment: dict[str, tuple[str, ...]] = {}
    """Further environment variables that `journeywork up` passes to a process (`nats`, `vllm`, `gateway`,
    `sampler`, `judge`, `trainer`, `store`, `ui`, `telemetry`): names, or prefixes that end in `*`. docs/operations.md
    lists what each process gets anyway."""

    def path(self, *parts: str) -> Path:
        """Return a path under the run directory. An absolute part replaces what precedes it."""
        return Path(self.run_dir).joinpath(*parts)

    def trainer_of(self, model: ModelConfig) -> TrainerConfig:
        """Return `[trainer]` with the model's own settings in place of the shared ones, and the served length as the
        longest sequence of Unsloth. Raises `ConfigError`, also for a setting that all models of an installation
        share."""
        if shared := _SHARED & set(model.trainer):
            name = min(shared)
            raise ConfigError(f"models: trainer of {model.name}: `{name}` is shared by all models: set trainer.{name}")
        values = merged(msgspec.to_builtins(self.trainer), model.trainer)
        if values["engine"] == "unsloth" and not values["unsloth"]["max_seq_length"]:
            values = merged(values, {"unsloth": {"max_seq_length": self.vllm.max_model_len}})
        try:
            return convert(values, TrainerConfig, "trainer")
        except ConfigError as error:
            raise ConfigError(f"models: trainer of {model.name}: {error}") from error

    def may_train(self, version: str) -> bool:
        """Return whether a model may learn from what `version` answered: false for an outside model unless each of its
        tables says `may_train`."""
        name = outside_model(version)
        return not is_outside(version) or {True} == {table.may_train for table in self.outside if table.name == name}

    def apprentices(self) -> dict[str, str]:
        """Return the apprentice of each outside model that has one: the policy model that may take it over. By name."""
        return {table.name: table.apprentice for table in self.outside if table.apprentice}

    def max_loras(self) -> int:
        """Return `vllm.max_loras`, or the number that staleness and models need where it is 0. Raises `ConfigError`."""
        staleness = max((self.trainer_of(model).max_staleness for model in self.models), default=0)
        return self.vllm.max_loras or max(4, staleness + 2, len(self.models) + 1)

    def model(self, name: str) -> ModelConfig:
        """Return the model with this name. Raises `ConfigError` if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        raise ConfigError(f"no model {name!r} is configured; there are: {', '.join(m.name for m in self.models)}")
