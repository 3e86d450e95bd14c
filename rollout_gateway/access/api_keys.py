"""API keys: stored as hashes, each with a role, a scope, an expiry and a rate. `journeywork keys` manages them.

`capture.identity` checks the key of every request here, by the request's head. A key's name is the `owner` of the runs
that the key opens. Keys of one name share their runs and their rate, so that a key can be replaced by another. The rate
counts "calls": a request is one call, and requests that cost the gateway more are several. Keys come from the settings
and from a file that is read again when it changes. Without any key, everyone may call, and the gateway listens on the
loopback interface only."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from pipeline.config import ConfigError, GatewayConfig, KeyConfig
from pipeline.security.host_names import is_loopback
from pipeline.security.key_file import check_keys, expires_at, name_of, read_keys
from pipeline.telemetry.logs import get_logger
from rollout_gateway.http.errors import ApiError, invalid_key

logger = get_logger("rollout_gateway.access.api_keys")

_FILE_CHECK_S = 1.0
"""Seconds between two looks at the file of keys."""
_FileVersion = tuple[int, ...] | None
"""Modification time, size and inode of the file of keys. `None` if there is no file."""


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of a request's API key."""

    owner: str = ""
    """The key's name. Empty on a gateway without keys."""
    operator: bool = False
    """May read and complete every run, read metrics, and decide which versions are served."""
    calls_only: bool = False
    """May make model calls, and nothing else."""
    feedback_only: bool = False
    """May give feedback on every run, and do nothing else."""
    models: frozenset[str] = frozenset()
    """Models it may use. Empty: all."""
    trajectory: str = ""
    """The trajectory whose token this is. Empty for an API key."""
    charged: bool = False
    """Of a trajectory's token: whether the request was counted already as a call of the key that opened the
    trajectory. Without reading the log it can be only if the trajectory is in memory."""

    def owns(self, owner: str) -> bool:
        """Whether it may use the runs that `owner` opened."""
        return self.operator or self.owner == owner

    def sees(self, model: str) -> bool:
        """Whether it may use the model."""
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raise a 403 `ApiError` if it may not use the model."""
        if not self.sees(model):
            raise ApiError(403, "model_not_allowed", f"This API key may not use the model {model!r}.", param="model")


FULL_ACCESS = Access(operator=True)
"""The access of every caller on a gateway without keys."""


@dataclass(eq=False)
class _Account:
    """What all keys of one name share: their rate, and the models and expiry of their trajectories' tokens."""

    per_minute: int
    """0: no limit."""
    left: float
    """Calls left. Refilled at the rate, and full after a minute."""
    refilled_at: float
    models: frozenset[str]
    expires_at: float

    def spend(self, name: str, calls: int = 1, counted: int = 0) -> None:
        """Count so many calls, of which `counted` were counted before. Raises a 429 `ApiError` if no call is left. If
        one is left, any number may be spent: `left` falls below 0, and later requests wait longer. `name`: of the keys,
        for the error."""
        if not self.per_minute:
            return
        now, rate = time.monotonic(), self.per_minute / 60
        self.left = min(self.per_minute, self.left + (now - self.refilled_at) * rate + counted)
        self.refilled_at = now
        if self.left < 1:
            wait_s = int((1 - self.left) / rate) + 1
            message = f"The key {name!r} may make {self.per_minute} calls a minute. Try again in {wait_s} s."
            raise ApiError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        self.left -= calls

    def extend(self, key: KeyConfig, models: frozenset[str]) -> None:
        """Add a key of this name, and set `left` to a minute's calls. Of different limits the widest holds."""
        limited = self.per_minute and key.calls_per_minute
        self.per_minute = max(self.per_minute, key.calls_per_minute) if limited else 0
        self.left = float(self.per_minute)
        self.models = self.models | models if self.models and models else frozenset()
        self.expires_at = max(self.expires_at, expires_at(key))


class ApiKeys:
    """Authenticates API keys and limits their rates. Raises `ConfigError` for invalid settings or an invalid file."""

    def __init__(self, config: GatewayConfig, file: Path | None = None) -> None:
        """`file`: the file of keys, which need not exist yet; `None`: the keys of the settings only."""
        self._settings, self._file = config.keys, file
        self._file_version: _FileVersion = None
        """Version of the key file when it was last read."""
        self.required = bool(config.keys)
        """Whether requests need a key. Never reset: a file that is deleted must not open the gateway."""
        self._keys: dict[str, tuple[Access, float]] = {}
        """Access and expiry by the key's SHA-256."""
        self._accounts: dict[tuple[str, bool], _Account] = {}
        """By the keys' name, and whether they are for feedback only: such a key keeps no run's token valid."""
        self._reading: defaultdict[tuple[str, bool], asyncio.Lock] = defaultdict(asyncio.Lock)
        """As `_accounts`; each is held while a run is read for a request of these keys."""
        if not self.reload():
            self._replace_keys(())
        if not self.required and not is_loopback(config.host):
            raise ConfigError(
                f"gateway.host is {config.host}, but without API keys the gateway listens on 127.0.0.1 only: add "
                "one with `journeywork keys add`"
            )

    # -- checking ------------------------------------------------------------------------------------------------

    def authenticate(self, key: str, calls: int = 1) -> Access:
        """Count a request of the key as so many calls and return what it permits. Raises a 401 or 429 `ApiError`."""
        if not self.required:
            return FULL_ACCESS
        # The look-up is by hash, so its duration reveals nothing about the keys.
        access, expiry = self._keys.get(hashlib.sha256(key.encode()).hexdigest(), (FULL_ACCESS, -math.inf))
        if expiry <= time.time():
            raise invalid_key()
        self._accounts[access.owner, access.feedback_only].spend(access.owner, calls)
        return access

    def _account(self, owner: str, feedback_only: bool = False) -> _Account:
        """Return the account of the keys named `owner`; if there is no such key any more, a new one without a limit.
        Look it up again after each `await`, since a changed file of keys replaces all accounts."""
        return self._accounts.get((owner, feedback_only)) or _Account(0, 0.0, 0.0, frozenset(), -math.inf)

    def spend(self, owner: str, calls: int, *, feedback_only: bool = False) -> None:
        """Count further calls of the keys named `owner`. Raises a 429 `ApiError` if none is left."""
        self._account(owner, feedback_only).spend(owner, calls)

    @asynccontextmanager
    async def reading(self, owner: str, *, feedback_only: bool = False) -> AsyncIterator[Callable[[int], None]]:
        """Count what is read of a run for a request of the keys named `owner`. The block gets a function and calls it
        with the bytes of each part. Each MiB counts as a further call, after the block. Requests of one name read one
        after the other, and each needs a call that is left, so that many at once can't read more than the rate pays
        for. Raises a 429 `ApiError` if none is left."""
        sizes = [0]
        async with self._reading[owner, feedback_only]:
            self.spend(owner, 0, feedback_only=feedback_only)
            try:
                yield sizes.append
            finally:
                self._account(owner, feedback_only).left -= sum(sizes) >> 20

    def charge_runs(self, access: Access, runs: int) -> None:
        """Count a request about so many runs, which `authenticate` counted as one call, as a call for each of them.
        Raises a 429 `ApiError` if requests that were checked at the same time left no call."""
        if runs > 1:
            self._account(access.owner, access.feedback_only).spend(access.owner, runs, counted=1)

    def count_calls(self, owner: str, calls: int) -> None:
        """Count further calls of the keys named `owner`, for a call that was admitted already. Raises nothing: if no
        call is left, later requests wait longer."""
        self._account(owner).left -= calls

    def charge(self, owner: str, model: str, calls: int = 1) -> None:
        """Count a request with a trajectory's token as calls of the key that opened the trajectory, named `owner`.

        Raises a 401, 403 or 429 `ApiError` if that key has expired, may not use the model or has no call left.
        `owner` is empty if the trajectory was opened without a key, which limits nothing."""
        if not owner or not self.required:
            return
        account = self._account(owner)
        if account.expires_at <= time.time():
            raise invalid_key()
        Access(models=account.models).check_model(model)
        account.spend(owner, calls)

    # -- the file ------------------------------------------------------------------------------------------------

    def reload(self) -> bool:
        """Read the file again if it has changed. Returns whether it has. Raises `ConfigError` and keeps the keys if
        it is invalid."""
        return self._apply(self._read_changed())

    def _read_changed(self) -> tuple[_FileVersion, tuple[KeyConfig, ...]] | None:
        """Read the file if it has changed since it was last read. Returns its version and keys; `None` if it has not
        changed. `watch` calls it in a thread, so it changes nothing."""
        if self._file is None:
            return None
        try:
            stat = self._file.stat()
            version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            return None if version == self._file_version else (version, read_keys(self._file))
        except FileNotFoundError:
            return None if self._file_version is None else (None, ())

    def _apply(self, changed: tuple[_FileVersion, tuple[KeyConfig, ...]] | None) -> bool:
        """Replace the keys by those that `_read_changed` returned, unless that is `None`. Returns whether it did."""
        if changed is None:
            return False
        self._replace_keys(changed[1])
        self._file_version, self.required = changed[0], True
        return True

    async def watch(self) -> None:
        """Read the file whenever it changes. Runs until it is cancelled."""
        logged = ""
        while True:
            await asyncio.sleep(_FILE_CHECK_S)
            try:
                if self._apply(await anyio.to_thread.run_sync(self._read_changed)):
                    logger.info("read the file of API keys", keys=len(self._keys))
                logged = ""
            except (ConfigError, OSError) as error:
                if logged != str(error):
                    logged = str(error)
                    logger.error("cannot read the file of API keys: the keys stay as they were", error=logged)

    def _replace_keys(self, from_file: Iterable[KeyConfig]) -> None:
        """Replace all keys and accounts by those of the settings and of the file. A name whose rate is unchanged keeps
        the calls that it has left."""
        now = time.monotonic()
        keys: dict[str, tuple[Access, float]] = {}
        accounts: dict[tuple[str, bool], _Account] = {}
        for key in (*check_keys(self._settings), *from_file):
            digest, name, expiry = key.sha256.lower(), name_of(key), expires_at(key)
            models = frozenset(key.models)
            feedback_only = key.role == "feedback"
            access = Access(name, key.role == "operator", key.calls_only, feedback_only, models)
            keys[digest] = access, expiry
            account = _Account(key.calls_per_minute, 0.0, now, models, expiry)
            accounts.setdefault((name, feedback_only), account).extend(key, models)
        for name_and_kind, account in accounts.items():
            before = self._accounts.get(name_and_kind)
            if before is not None and before.per_minute == account.per_minute:
                account.left, account.refilled_at = before.left, before.refilled_at
        self._keys, self._accounts = keys, accounts
