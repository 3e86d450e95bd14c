"""`judge.request.params`: any parameter of litellm's `completion`, with secrets from the environment only.

They are sent with each call, and those that can change scores are part of the judge's identity
(`judge.scoring.judge_hash`)."""

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
"""Parameters that the judge sets itself, because another value would break the parsing of replies, or that would change
who judges (`fallbacks`)."""
_CONNECTION = re.compile(
    r"^(?:api_\w+|base_url|\w*headers|organization|tenant_id|client_\w+|azure_\w+|aws_\w+|vertex_\w+|\w*timeout"
    r"|\w*retries|max_tokens|max_completion_tokens|user|metadata|region_name|watsonx_\w+|ssl_\w+)$"
)
"""Parameters that say how to reach the model and do not change its scores."""


def read_key(variable: str, setting: str) -> str:
    """Return the key in an environment variable, or an empty string if `setting` names none. Raises `ConfigError` if
    the variable is not set."""
    if variable and not os.environ.get(variable):
        raise ConfigError(f"{setting}: the environment has no {variable}")
    return os.environ.get(variable, "")


def advice_on_key(config: JudgeConfig) -> str:
    """Return what to do where the provider of the judge model refuses the key."""
    if config.api_key_env:
        return f"check the key in the environment variable {config.api_key_env} (judge.api_key_env)"
    return "name the environment variable with its key in judge.api_key_env"


def resolve_params(config: JudgeConfig) -> dict[str, Any]:
    """Return `judge.request.params` with references to the environment resolved. Raises `ConfigError` naming a
    parameter that cannot be used, or a missing variable."""
    params = config.request.params
    if reserved := next((key for key in params if key in RESERVED), ""):
        raise ConfigError(f"judge.request.params.{reserved}: the judge sets this parameter itself; remove it")
    return {name: _resolve(value, f"judge.request.params.{name}") for name, value in params.items()}


def scoring_params(config: JudgeConfig) -> dict[str, Any]:
    """Return the parameters of `judge.request.params` that can change scores, with references to the environment
    unresolved. They are part of the judge's identity, which is no secret."""
    return {name: value for name, value in config.request.params.items() if not _CONNECTION.match(name)}


def _resolve(value: Any, where: str) -> Any:
    """Return a parameter's value with references such as `${NAME}` replaced by environment variables, at any depth.
    `where`: the parameter's name. Raises `ConfigError` for a variable that is not set."""
    if isinstance(value, Mapping):
        return {k: _resolve(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(v, where) for v in value]
    if not isinstance(value, str):
        return value
    try:
        return REFERENCE.sub(lambda reference: os.environ[reference[1]], value)
    except KeyError as missing:
        raise ConfigError(f"{where}: the environment has no {missing.args[0]}") from missing
