"""`judge.params`: whatever litellm takes, from the settings, with secrets from the environment only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pipeline.config import ConfigError, JudgeConfig
from pipeline.config.secrets import REFERENCE

RESERVED = frozenset(
    {"model", "messages", "response_format", "client", "stream", "n", "tools", "tool_choice", "functions", "fallbacks"}
)  # fmt: skip
"""What the judge sets itself; another value would break the reading of its replies."""
_CONNECTION = re.compile(
    r"^(?:api_\w+|base_url|\w*headers|organization|tenant_id|client_\w+|azure_\w+|aws_\w+|vertex_\w+|\w*timeout"
    r"|\w*retries|max_tokens|max_completion_tokens|user|metadata|region_name|watsonx_\w+|ssl_\w+)$"
)
"""Parameters that say how to reach the model, not what it says."""


def of_model(config: JudgeConfig, name: str, *, same_provider: bool) -> dict[str, Any]:
    """litellm's parameters for the model `name`: `judge.params` where it is of the judge model's provider (secrets go nowhere
    else), then its own `judge.model_params`. References to the environment are resolved.

    Raises `ConfigError` naming a parameter that can't be used, or the variable that is missing."""
    table = dict(config.params) if same_provider else {}
    own = config.model_params.get(name, {})
    check(config)
    return {
        **{k: _resolved(v, f"judge.params.{k}") for k, v in table.items() if k not in own},
        **{k: _resolved(v, f"judge.model_params.{name}.{k}") for k, v in own.items()},
    }


def check(config: JudgeConfig) -> None:
    """Raises `ConfigError` for a reserved parameter, or parameters of a model that is not asked."""
    tables = {"judge.params": config.params}
    tables |= {f"judge.model_params.{name}": table for name, table in config.model_params.items()}
    for name in config.model_params:
        if name not in (config.model, *config.fallbacks):
            raise ConfigError(f"judge.model_params: {name} is neither judge.model nor one of judge.fallbacks")
    for where, table in tables.items():
        for key in table:
            if key in RESERVED:
                raise ConfigError(f"{where}.{key}: the judge sets this parameter itself")


def scoring(config: JudgeConfig) -> dict[str, Any]:
    """The parameters that can change scores, as written: they name the judge configuration."""
    tables = {"": config.params, **config.model_params}
    found = {n: {k: v for k, v in t.items() if not _CONNECTION.match(k)} for n, t in tables.items()}
    return {n: t for n, t in found.items() if t}


def _resolved(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _resolved(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(v, where) for v in value]
    return REFERENCE.sub(lambda m: _variable(m, where), value) if isinstance(value, str) else value


def _variable(match: re.Match[str], where: str) -> str:
    name = match.group(1) or match.group(2)
    if name not in os.environ:
        raise ConfigError(f"{where}: the environment has no {name}")
    return os.environ[name]
