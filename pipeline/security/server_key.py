"""The API key of the inference servers.

The servers (vLLM) answer only who sends it, such as the gateway. `up` and `prepare` write it to a file of the run
directory, which the setting `vllm.api_key_file` names."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import Config, ConfigError


def api_key(config: Config) -> str:
    """Return the API key of the inference servers from the file `vllm.api_key_file`; empty if the setting is empty.

    Raises `ConfigError` if the file can't be used."""
    if not config.vllm.api_key_file:
        return ""
    try:
        key = Path(config.vllm.api_key_file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"vllm.api_key_file: {config.vllm.api_key_file} can't be read: {error}") from error
    if not key or not key.isprintable():
        raise ConfigError(f"vllm.api_key_file: {config.vllm.api_key_file} must hold the key as one printable line")
    return key
