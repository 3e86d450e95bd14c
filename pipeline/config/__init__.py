"""Settings: one TOML file, dotted flags over it, one validated frozen tree, saved with every run.

`load(path, ["trainer.optimizer.learning_rate=1e-3"])` returns a `Config`. Unknown keys and wrong types raise
`ConfigError`, which names the key. `journeywork docs` makes a page of the docstrings of the sections.

| module | what it holds |
| --- | --- |
| `tree` | `Config`, the root, and `ModelConfig` |
| `gateway`, `judge`, `trainer` | one section of the file each, with its tables |
| `outside` | models of providers |
| `alarms` | the section of that name |
| `sections` | the other sections |
| `types` | `Section`, whose `replace` checks what it sets, and numbers within limits |
| `files` | `load`, `save`, `config_hash` |
| `batch_settings` | what a requested batch chooses for its own step |
| `overrides` | values given on the command line; errors that name the setting |
| `checks` | settings that have the right type and can't be used |
| `secrets` | which values look like secrets; `${NAME}` references |
"""

from pipeline.config.alarms import AlarmsConfig
from pipeline.config.batch_settings import with_batch_settings
from pipeline.config.files import config_hash, load, save
from pipeline.config.gateway import DetectionConfig, GatewayConfig, HttpConfig, KeyConfig, MaskConfig, ReplicasConfig
from pipeline.config.judge import (
    FeedbackConfig,
    HealingConfig,
    JudgeConfig,
    JudgeRequestConfig,
    RewardConfig,
    TeacherConfig,
)
from pipeline.config.outside import OutsideConfig
from pipeline.config.sections import (
    BudgetConfig,
    NatsConfig,
    RetentionConfig,
    SigningConfig,
    StoreConfig,
    SupervisorConfig,
    TelemetryConfig,
    UiConfig,
    VllmConfig,
)
from pipeline.config.trainer import (
    DistillConfig,
    LoraConfig,
    LossConfig,
    MemoryConfig,
    OptimizerConfig,
    TrainerConfig,
    UnslothConfig,
)
from pipeline.config.tree import PROCESSES, Config, ModelConfig
from pipeline.config.types import Section
from pipeline.errors import ConfigError
