"""Settings in files: read them with overrides, save the resolved ones, hash a section."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from pipeline.config.checks import check
from pipeline.config.overrides import convert, set_override
from pipeline.config.tree import Config
from pipeline.config.types import Section
from pipeline.errors import ConfigError
from pipeline.files import write_whole


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Settings from a TOML file and `section.key=value` overrides (values by the type of the
    setting: as TOML or JSON, else as plain strings).

    Raises `ConfigError` naming the setting that can't be used."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no settings file {path}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the settings file {path} can't be read: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        set_override(tree, Config, override)
    config = convert(tree, Config)
    check(config)
    return config


def _without_none(tree: Any) -> Any:
    """TOML has no null: a setting that is not set is left out."""
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree] if isinstance(tree, list | tuple) else tree


def save(config: Config, path: Path) -> None:
    """Write the resolved settings as TOML, so that the run can be repeated."""
    write_whole(path, tomli_w.dumps(_without_none(msgspec.to_builtins(config))))


def config_hash(section: Section) -> str:
    """Short SHA-256 of a section's values: two runs with the same hash were told the same."""
    return hashlib.sha256(msgspec.json.encode(section, order="sorted")).hexdigest()[:16]
