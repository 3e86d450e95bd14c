"""API keys of people and programs: hashed, with a role, a scope, an end and a rate. `journeyman keys` makes and revokes them.

A key is known by its name: what a key opens belongs to its name, and keys of one name share what they own and their rate,
so that a key can be replaced by another. Keys come from the settings and from a file that is read again when it changes.
Without any, everyone may call, and the gateway listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import anyio.to_thread
import msgspec

from pipeline.config import ConfigError, GatewayConfig, KeyConfig
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError, invalid_key
from rollout_gateway.http.origins import is_loopback

log = get_logger("rollout_gateway.access.api_keys")

_LOOK_S = 1.0
"""Between two looks at the file."""
_Seen = tuple[int, ...] | None
_SHA256 = re.compile(r"[0-9a-f]{64}")


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of keys: an array of tables with the settings of `gateway.keys`."""

    keys: tuple[KeyConfig, ...] = ()


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """The keys in a file. Raises `ConfigError` where it can't be read, `FileNotFoundError` where it is not there."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), KeyFile).keys
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def name_of(key: KeyConfig) -> str:
    """By which a key is known: its name, or a part of its hash where it has none."""
    return key.name or f"key-{key.sha256[:12].lower()}"


def ends_at(key: KeyConfig) -> float:
    """When a key ends, in seconds since the Unix epoch; infinity where it does not. Raises `ConfigError`."""
    if not key.expires:
        return math.inf
    try:
        moment = datetime.fromisoformat(key.expires)
    except ValueError as error:
        raise ConfigError(f"key {name_of(key)!r}: expires: {error}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class Access:
    """What the key of a request permits."""

    owner: str = ""
    """The key's name: whose runs it may touch. Empty for a gateway without keys."""
    operator: bool = False
    """Decides about versions, reads metrics, and may touch every run."""
    calls_only: bool = False
    models: frozenset[str] = frozenset()
    """Empty: all."""
    trajectory: str = ""
    """The run whose own key it is; empty for any other key."""

    def owns(self, owner: str) -> bool:
        """Whether it may touch the runs that the key of this name opened."""
        return self.operator or self.owner == owner

    def sees(self, model: str) -> bool:
        """Whether the key is for this model."""
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raises a 403 `ApiError` where the key is not for this model."""
        if not self.sees(model):
            raise ApiError(
                403,
                f"This API key is for other models than {model!r}.",
                kind="permission_error",
                code="model_not_allowed",
                param="model",
            )


FULL_ACCESS = Access(operator=True)
"""A caller of a gateway without keys."""


@dataclass(eq=False)
class _Account:
    """What the keys of one name share: their rate, and what trajectory keys of their runs are good for."""

    per_minute: int
    """0: no limit."""
    left: float
    at: float
    models: frozenset[str]
    until: float

    def spend(self, name: str) -> None:
        """One call; raises a 429 `ApiError` where there were too many. Refilled at its rate, full after a minute."""
        if not self.per_minute:
            return
        now, rate = time.monotonic(), self.per_minute / 60
        self.left = min(self.per_minute, self.left + (now - self.at) * rate)
        self.at = now
        if self.left >= 1:
            self.left -= 1
            return
        wait = (1 - self.left) / rate
        raise ApiError(
            429,
            f"The key {name!r} may call {self.per_minute} times a minute.",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers=((b"retry-after", str(int(wait) + 1).encode()),),
        )


class ApiKeys:
    """Who may do what. Raises `ConfigError` for settings or a file that can't be used."""

    def __init__(self, config: GatewayConfig, project: str = "default", file: Path | None = None) -> None:
        self._settings, self._project, self._file = config.keys, project, file
        self._seen: _Seen = None
        """Of the file as it was read last; `None` where there was none."""
        self.required = bool(config.keys)
        """Whether a key is needed. Once it is, it stays so: a file that vanishes opens nothing."""
        self._keys: dict[str, tuple[Access, float]] = {}
        self._accounts: dict[str, _Account] = {}
        if not self.reload():
            self._take(())
        if not self.required and not is_loopback(config.host):
            raise ConfigError(
                f"gateway.keys: without keys the gateway can't listen on {config.host}, only on 127.0.0.1: make one "
                "with `journeyman keys add`"
            )

    # -- checking ------------------------------------------------------------------------------------------------

    def authenticate(self, key: str) -> Access:
        """What a key permits, one call spent; raises a 401 or 429 `ApiError`."""
        if not self.required:
            return FULL_ACCESS
        # The lookup is by hash, so its timing says nothing of any key.
        found = self._keys.get(hashlib.sha256(key.encode()).hexdigest())
        if found is None or found[1] <= time.time():
            raise invalid_key()
        access = found[0]
        self._accounts[access.owner].spend(access.owner)
        return access

    def charge(self, owner: str, model: str) -> None:
        """A call with a trajectory's own key counts as one of the key that opened it, and ends with that key. Raises a
        401, 403 or 429 `ApiError`. A run that was opened without a key has no `owner`, and nothing to charge."""
        if not owner or not self.required:
            return
        account = self._accounts.get(owner)
        if account is None or account.until <= time.time():
            raise invalid_key()
        if account.models and model not in account.models:
            Access(models=account.models).check_model(model)
        account.spend(owner)

    # -- the file ------------------------------------------------------------------------------------------------

    def reload(self) -> bool:
        """Read the file again where it has changed; whether it had. Raises `ConfigError` where it can't be read: the keys
        stay as they were."""
        return self._use(self._changed())

    def _changed(self) -> tuple[_Seen, tuple[KeyConfig, ...]] | None:
        """What the file holds, where that is not what was read last."""
        if self._file is None:
            return None
        try:
            stat = self._file.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            return None if seen == self._seen else (seen, read_keys(self._file))
        except FileNotFoundError:
            return None if self._seen is None else (None, ())

    def _use(self, changed: tuple[_Seen, tuple[KeyConfig, ...]] | None) -> bool:
        if changed is None:
            return False
        self._take(changed[1])
        self._seen, self.required = changed[0], True
        return True

    async def watch(self) -> None:
        """For ever: read the file when it changes."""
        told = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self._use(await anyio.to_thread.run_sync(self._changed)):
                    log.info("keys read again", keys=len(self._keys))
                told = ""
            except (ConfigError, OSError) as error:
                if told != str(error):  # once, and not every second
                    told = str(error)
                    log.error("the file of keys can't be read: the keys stay as they were", error=told)

    def _take(self, filed: Iterable[KeyConfig]) -> None:
        now = time.monotonic()
        keys: dict[str, tuple[Access, float]] = {}
        accounts: dict[str, _Account] = {}
        for key in (*self._settings, *filed):
            digest, name, until = key.sha256.lower(), name_of(key), ends_at(key)
            if not _SHA256.fullmatch(digest):
                raise ConfigError(f"key {name!r}: sha256 is 64 hexadecimal digits")
            if key.projects and self._project not in key.projects:
                continue
            models = frozenset(key.models)
            access = Access(name, key.role == "operator", key.calls_only, models)
            keys[digest] = access, until
            account = accounts.get(name)
            if account is None:
                accounts[name] = _Account(
                    key.calls_per_minute, float(key.calls_per_minute), now, models, until
                )
            else:  # the most that one of them permits
                limited = account.per_minute and key.calls_per_minute
                account.per_minute = max(account.per_minute, key.calls_per_minute) if limited else 0
                account.left = float(account.per_minute)
                account.models = account.models | models if account.models and models else frozenset()
                account.until = max(account.until, until)
        for name, account in accounts.items():
            before = self._accounts.get(name)
            if before is not None and before.per_minute == account.per_minute:
                account.left, account.at = before.left, before.at
        self._keys, self._accounts = keys, accounts
