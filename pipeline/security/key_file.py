"""The file of API keys (`gateway.keys_file`): the one reader of gateway, dashboard and `journeywork keys`.

It holds an array of tables with the settings of `gateway.keys`: of each key its SHA-256, never the key itself. The
checks are those of the keys in the settings, too.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pipeline.config import ConfigError, KeyConfig

_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_OF_NOTHING = hashlib.sha256().hexdigest()
"""With this digest, a request without a key would have a key's permissions."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    keys: tuple[KeyConfig, ...] = ()


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """Return the keys of a file. Raises `ConfigError` if its content is invalid, `FileNotFoundError` if there is
    none."""
    try:
        return check_keys(msgspec.convert(tomllib.loads(path.read_text("utf-8")), _Content).keys)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def check_keys(keys: Iterable[KeyConfig]) -> tuple[KeyConfig, ...]:
    """Return `keys` unchanged. Raises `ConfigError` if the hash of one is no SHA-256, or that of an empty key, or its
    date of expiry is none."""
    for key in keys:
        expires_at(key)
        if not _SHA256.fullmatch(key.sha256):
            raise ConfigError(f"key {name_of(key)!r}: sha256 must be 64 hexadecimal digits")
        if key.sha256.lower() == _OF_NOTHING:
            raise ConfigError(
                f"key {name_of(key)!r}: sha256 is the digest of an empty key; make one, and use its digest"
            )
    return tuple(keys)


def name_of(key: KeyConfig) -> str:
    """Return the key's name, or part of its hash if it has none."""
    return key.name or f"key-{key.sha256[:12].lower()}"


def expires_at(key: KeyConfig) -> float:
    """Return when a key expires, in seconds since the Unix epoch, or infinity. Raises `ConfigError`."""
    if not key.expires:
        return math.inf
    try:
        moment = datetime.fromisoformat(key.expires)
    except ValueError as error:
        raise ConfigError(f"key {name_of(key)!r}: expires: {error}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
