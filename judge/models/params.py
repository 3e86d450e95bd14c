"""`judge.request.params` and `judge.request.model_params`: any parameter of litellm's `completion`, with secrets from
the environment only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pipeline.config import ConfigError, JudgeConfig
from pipeline.config.secrets import REFERENCE

RESERVED = frozenset(
    {"model", "messages", "response_format", "client", "stream", "n", "tools", "tool_choice", "functions", "fallbacks"}
)
"""Parameters that the judge sets itself. Another value would break the parsing of replies."""
_CONNECTION = re.compile(
    r"^(?:api_\w+|base_url|\w*headers|organization|tenant_id|client_\w+|azure_\w+|aws_\w+|vertex_\w+|\w*timeout"
    r"|\w*retries|max_tokens|max_completion_tokens|user|metadata|region_name|watsonx_\w+|ssl_\w+)$"
)
"""Parameters that say how to reach the model and do not change its scores."""


def read_api_key(config: JudgeConfig) -> str:
    """Return the key in the variable `judge.api_key_env`, or an empty string if none is named. Raises `ConfigError`."""
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if config.api_key_env and not key:
        raise ConfigError(f"judge.api_key_env: the environment has no {config.api_key_env}")
    return key


def advice_on_key(config: JudgeConfig) -> str:
    """Return what to do where the provider of the judge model refuses the key."""
    if config.api_key_env:
        return f"check the key in the environment variable {config.api_key_env} (judge.api_key_env)"
    return "name the environment variable with its key in judge.api_key_env"


def resolve_params(config: JudgeConfig, name: str, *, same_provider: bool) -> dict[str, Any]:
    """Return the parameters for the model `name`, with references to the environment resolved.

    `judge.request.model_params` of the model come first. `judge.request.params` are added if `same_provider`: they
    may hold secrets of the judge model's provider. Raises `ConfigError` naming a parameter that cannot be used, or a
    missing variable."""
    tables = {"judge.request.params": config.request.params}
    tables |= {f"judge.request.model_params.{model}": table for model, table in config.request.model_params.items()}
    for model in config.request.model_params:
        if model not in (config.model, *config.fallbacks):
            raise ConfigError(f"judge.request.model_params: {model} is neither judge.model nor one of judge.fallbacks")
    for where, table in tables.items():
        if reserved := next((key for key in table if key in RESERVED), ""):
            raise ConfigError(f"{where}.{reserved}: the judge sets this parameter itself; remove it")
    own = config.request.model_params.get(name, {})
    shared = config.request.params if same_provider else {}
    return {
        **{k: _resolve(v, f"judge.request.params.{k}") for k, v in shared.items() if k not in own},
        **{k: _resolve(v, f"judge.request.model_params.{name}.{k}") for k, v in own.items()},
    }


def scoring_params(config: JudgeConfig) -> dict[str, Any]:
    """Return the parameters that can change scores, by model and as written. They are part of the judge's identity."""
    tables = {"": config.request.params, **config.request.model_params}
    scoring = {n: {k: v for k, v in t.items() if not _CONNECTION.match(k)} for n, t in tables.items()}
    return {n: t for n, t in scoring.items() if t}


def _resolve(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {k: _resolve(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(v, where) for v in value]
    return REFERENCE.sub(lambda m: _variable(m, where), value) if isinstance(value, str) else value


def _variable(match: re.Match[str], where: str) -> str:
    name = match.group(1) or match.group(2)
    if name not in os.environ:
        raise ConfigError(f"{where}: the environment has no {name}")
    return os.environ[name]
