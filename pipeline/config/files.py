"""Settings in files: read them with overrides, save the resolved ones, hash a section.

A settings file is TOML (`journeywork up --config run.toml`). An *override* is a text such as `trainer.seed=4` from the
command line (`--set trainer.seed=4`), which counts more than the file; a key that holds a dot is quoted: `--set
'vllm.env."A.B"=1'`. Unknown keys and wrong types are errors that name the key. *Resolved* settings have no `auto` left
(`pipeline.running.resolved`); a run directory keeps them as `config.toml`, so that the run can be repeated."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Iterable
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


def load(path: str | Path | None = None, overrides: Iterable[str] = (), *, sections: Collection[str] = ()) -> Config:
    """Read settings from a TOML file (`None`: the defaults) and from overrides such as `trainer.seed=4`.

    An override's value is read as TOML or JSON by the type of the setting, else as a string. `sections`: the tables
    of the file that are read; the others may hold anything, so of the checks only that of addresses is made. Empty:
    all. Raises `ConfigError`, which names the setting that is wrong, and the file if it is wrong there."""
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
    if sections:
        tree = {k: v for k, v in tree.items() if k in sections or not isinstance(v, dict | list)}
    if path is not None:
        try:
            convert(tree, Config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    for override in overrides:
        set_override(tree, Config, override)
    config = convert(tree, Config)
    check(config, whole=not sections)
    return config


def _without_none(tree: Any) -> Any:
    """Return a tree of dicts and lists without the keys whose value is `None`: TOML has no null."""
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree] if isinstance(tree, list | tuple) else tree


def save(config: Config, path: Path) -> None:
    """Write the settings to `path` as TOML, so that the run can be repeated."""
    write_whole(path, tomli_w.dumps(_without_none(msgspec.to_builtins(config))))


def config_hash(section: Section) -> str:
    """Return what identifies a section's values in events, as those of a judge or of a step: the first 16 hexadecimal
    digits of their SHA-256."""
    return hashlib.sha256(msgspec.json.encode(section, order="sorted")).hexdigest()[:16]
