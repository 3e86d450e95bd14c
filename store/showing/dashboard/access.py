"""Who may see the pages: keys as of the gateway, sessions, host names, and the headers that keep a page by itself.

Where the run has operator keys, a browser signs in with one, and programs send it as a bearer token. Without keys,
everyone on this machine may look, and the dashboard listens on the loopback interface only. Every request must come
from a page of the dashboard or from no page (`Origin`, `Sec-Fetch-Site`), so that other web pages can neither act
in the user's name nor read by the time that an answer takes."""

from __future__ import annotations

import hashlib
import secrets
import time
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pipeline.config import Config, ConfigError, KeyConfig
from pipeline.security.host_names import is_loopback, name_in_host
from pipeline.telemetry.logs import get_logger
from store.showing.dashboard.errors import PageError

log = get_logger("store.showing.dashboard.access")

COOKIE = "journeywork_session"
_SESSION_S = 12 * 3600.0
_SESSIONS = 256
"""Sessions that are remembered; the oldest is forgotten beyond it."""
_FILE_CHECK_S = 1.0
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with `no-referrer`, browsers send the pages' own forms with `Origin: null`
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""
_OTHER_PAGE = "This request comes from another web page: use the dashboard's own pages."


class _KeyFile(msgspec.Struct, frozen=True):
    keys: tuple[KeyConfig, ...] = ()


class Keys:
    """The operator keys of a run, from its settings and its file of keys.

    The file is read again when it changes, at most once in `_FILE_CHECK_S`. While it cannot be read, the keys stay as
    they were, as in the gateway, and the log says why."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` if the file of keys, or a key of the settings, is invalid or cannot be read."""
        self._keys_in_settings, self._project = config.gateway.keys, config.project
        self._file = config.path(config.gateway.keys_file)
        self._file_version: tuple[int, int] | None = None
        """Modification time in nanoseconds and size of the file when it was read; `None` if there was none."""
        self._keys_in_file: tuple[KeyConfig, ...] = ()
        self._had_keys = bool(self._keys_in_settings)
        """Never reset: a file of keys that is removed must not open the dashboard to everyone."""
        self._logged_problem = ""
        _check_keys(self._keys_in_settings, "gateway.keys")
        self._read_file()
        self._checked_at = time.monotonic()

    def required(self) -> bool:
        """Return whether the run has keys, or had any since this process started. Reads the file again if it has
        changed."""
        self._reload()
        return self._had_keys

    def accepts(self, key: str) -> bool:
        """Return whether `key` is an operator's key of this run and project that has not expired. Reads the file again
        if it has changed."""
        self._reload()
        digest = hashlib.sha256(key.encode()).hexdigest()
        return any(
            secrets.compare_digest(known_key.sha256.lower().encode(), digest.encode())
            and self._usable(known_key)
            for known_key in (*self._keys_in_settings, *self._keys_in_file)
        )

    def _usable(self, key: KeyConfig) -> bool:
        """Return whether `key` is an operator's, for this project, and has not expired."""
        if key.role != "operator" or (key.projects and self._project not in key.projects):
            return False
        return datetime.now(UTC) < _expiry(key)

    def _reload(self) -> None:
        """Read the file again if the last look at it was `_FILE_CHECK_S` ago. Logs a problem once and keeps the
        keys."""
        if time.monotonic() - self._checked_at < _FILE_CHECK_S:
            return
        self._checked_at = time.monotonic()
        try:
            self._read_file()
            self._logged_problem = ""
        except ConfigError as error:
            if self._logged_problem != str(error):
                self._logged_problem = str(error)
                log.error("cannot read the file of API keys: the keys stay as they were", error=str(error))

    def _read_file(self) -> None:
        """Read the file if it has changed; without one, it has no keys. Raises `ConfigError` and keeps the keys if the
        file is invalid or cannot be read."""
        try:
            status = self._file.stat()
            self._had_keys = True
            if (version := (status.st_mtime_ns, status.st_size)) != self._file_version:
                keys = msgspec.convert(tomllib.loads(self._file.read_text("utf-8")), _KeyFile).keys
                _check_keys(keys, str(self._file))
                self._keys_in_file, self._file_version = keys, version
        except FileNotFoundError:
            self._keys_in_file, self._file_version = (), None
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._file}: {error}") from error


def _check_keys(keys: Iterable[KeyConfig], source: str) -> None:
    """Raise `ConfigError`, which names `source`, if a key's `expires` is no date."""
    for key in keys:
        try:
            _expiry(key)
        except ValueError as error:
            raise ConfigError(f"{source}: key {key.name!r}: expires: {error}") from error


def _expiry(key: KeyConfig) -> datetime:
    """Return when a key expires; the end of time if it never does. Raises `ValueError` if `expires` is no date."""
    moment = datetime.fromisoformat(key.expires) if key.expires else datetime.max
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class Sessions:
    """Sign-ins of browsers: the cookie holds a random name, this process holds the key."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[str, float]] = {}

    def open(self, key: str) -> str:
        """Remember a key that was accepted; returns the value of the cookie."""
        while len(self._keys) >= _SESSIONS:
            del self._keys[next(iter(self._keys))]
        name = secrets.token_urlsafe(32)
        self._keys[name] = key, time.monotonic() + _SESSION_S
        return name

    def key(self, name: str) -> str | None:
        """The key of a session, or `None` if it is unknown or over."""
        key, ends_at = self._keys.get(name, ("", 0.0))
        return key if time.monotonic() < ends_at else None

    def close(self, name: str) -> None:
        """Forget a session."""
        self._keys.pop(name, None)


class Access:
    """Decides about every request."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` as `Keys`, and if the run has no keys and `ui.host` is not of the loopback interface."""
        self.keys, self.sessions = Keys(config), Sessions()
        host = config.ui.host
        self._loopback = is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in config.ui.hosts)}
        if not self._loopback and not self.keys.required():
            raise ConfigError(
                f"ui.host: without keys the dashboard listens on the loopback interface only, not on {host}: make an "
                "operator's key with `journeywork keys add --role operator`, or leave ui.host as it is"
            )

    def check_origin(self, request: Request) -> bool:
        """Refuse other host names and requests of other web pages. Returns whether a person follows a link on another
        site: the answer must then not depend on the history, because the other page can see when it arrives.
        Raises `PageError`."""
        host = request.headers.get("host", "")
        name = name_in_host(host)
        if name is None:
            raise PageError(
                400, f"The Host {host[:100]!r} is invalid: send a name or address, and a port or none."
            )
        if self._loopback and name not in self._names and not is_loopback(name):
            raise PageError(
                421, f"The dashboard does not serve the host name {name[:100]!r}: open it by its address."
            )
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if request.method in ("GET", "HEAD"):
            if origin and origin.partition("://")[2] != host:
                raise PageError(403, _OTHER_PAGE)
            if site in ("none", "same-origin"):
                return False
            whole_page = ("navigate", "document")
            if (request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest")) == whole_page:
                return True
            raise PageError(403, _OTHER_PAGE)
        own = (
            origin.partition("://")[2] == host
            if origin
            else (site == "same-origin" or "authorization" in request.headers)
        )
        if own:
            return False
        if origin or site != "none":
            raise PageError(403, _OTHER_PAGE)
        raise PageError(
            403,
            "A request that changes something must say where it comes from. A program sends an operator's key as "
            f"bearer token, or, if the run has no keys, the header `Origin: {request.url.scheme}://{host}`.",
        )

    def key(self, request: Request) -> str | None:
        """The key of the request's user; empty where the run has no keys; `None` where the user must sign in. Raises
        `PageError` for a bearer token that is wrong."""
        if not self.keys.required():
            return ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if not self.keys.accepts(token.strip()):
                raise PageError(401, "This key is no operator's key of this run.")
            return token.strip()
        key = self.sessions.key(request.cookies.get(COOKIE, ""))
        return key if key is not None and self.keys.accepts(key) else None

    def sign_in(self, key: str, response: Response, secure: bool) -> None:
        """Open a session for `key` and put its cookie into `response`. Raises a 401 `PageError` for a wrong key."""
        if not self.keys.accepts(key):
            raise PageError(
                401, "This key is no operator's key of this run: `journeywork keys add --role operator`."
            )
        response.set_cookie(
            COOKIE,
            self.sessions.open(key),
            max_age=int(_SESSION_S),
            httponly=True,
            samesite="strict",
            secure=secure,
        )
