"""Who may see the pages: keys as of the gateway, sessions, host names, and the headers that keep a page by itself.

Where the run has operator keys, a browser signs in with one, and programs send it as a bearer token. Without keys,
everyone on this machine may look, and the dashboard listens on the loopback interface only. Every request must come
from a page of the dashboard or from no page (`Origin`, `Sec-Fetch-Site`), so that other web pages can neither act
in the user's name nor read by the time that an answer takes."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from pipeline.config import Config, ConfigError
from pipeline.security.host_names import is_loopback, name_in_host
from pipeline.security.key_file import check_keys, expires_at, read_keys
from store.showing.pages.errors import PageError, SignInError

COOKIE = "journeywork_session"
_SESSION_S = 12 * 3600.0
_SESSIONS = 256
"""Sessions that are remembered; the oldest is forgotten beyond it."""
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


def _operator_keys(config: Config) -> set[str]:
    """Return the SHA-256 of the operator keys that open this run's pages now, from its settings and its file of keys.

    Raises `ConfigError` if the file cannot be read, or if a key is none."""
    file = config.path(config.gateway.keys_file)
    keys = check_keys(config.gateway.keys)
    try:
        with contextlib.suppress(FileNotFoundError):
            keys += read_keys(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error}") from error
    return {key.sha256.lower() for key in keys if key.role == "operator" and time.time() < expires_at(key)}


def _is_operator_key(config: Config, key: str) -> bool:
    """Return whether `key` is an operator's key of the installation. Raises as `_operator_keys`."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return any(secrets.compare_digest(known.encode(), digest.encode()) for known in _operator_keys(config))


class Access:
    """Decides whether the dashboard of one run answers a request, by where it comes from and by its user's key."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` as `_operator_keys`, and if the run has no keys and `ui.host` is not of the loopback
        interface."""
        self._config = config
        self._sessions: dict[str, tuple[str, float]] = {}
        """Sign-ins of browsers: the cookie holds a random name, this process the key, and when the session ends."""
        self._has_keys = False
        """Never reset: a file of keys that is removed must not open the dashboard to everyone."""
        _operator_keys(config)
        host = config.ui.host
        self._loopback = is_loopback(host)
        self._names = {"localhost", host.lower(), *(name.lower() for name in config.ui.hosts)}
        if not self._requires_key() and not self._loopback:
            raise ConfigError(
                f"ui.host: without keys the dashboard listens on the loopback interface only, not on {host}: make an "
                "operator's key with `journeywork keys add --role operator`, or leave ui.host as it is"
            )

    def _requires_key(self) -> bool:
        """Return whether the run has keys, or had any since this process started."""
        gateway = self._config.gateway
        self._has_keys |= bool(gateway.keys) or self._config.path(gateway.keys_file).exists()
        return self._has_keys

    def _accepts(self, key: str) -> bool:
        """Return whether `key` is an operator's key of this run and project that has not expired. Raises a 503
        `PageError` while the file of keys cannot be read."""
        try:
            return _is_operator_key(self._config, key)
        except ConfigError as error:
            raise PageError(503, f"Nobody can sign in until the keys are corrected. {error}") from error

    def may_read(self, config: Config, key: str) -> bool:
        """Return whether the user who has `key` may read another run, whose settings are `config`, as that run's own
        dashboard would decide. A run without keys is open on this machine only. Raises as `_operator_keys`."""
        if config.gateway.keys or config.path(config.gateway.keys_file).exists():
            return _is_operator_key(config, key)
        return self._loopback

    def check_origin(self, request: Request) -> bool:
        """Refuse other host names and requests of other web pages. Returns whether a person follows a link on another
        site: the answer must then not depend on the history, because the other page can see when it arrives.
        Raises `PageError`."""
        host = ", ".join(request.headers.getlist("host"))  # of several, no one says which is meant
        name = name_in_host(host)
        if name is None:
            raise PageError(400, f"The Host {host[:100]!r} is invalid: send a name or address, and a port or none.")
        if self._loopback and name not in self._names and not is_loopback(name):
            raise PageError(421, f"The dashboard does not serve the host name {name[:100]!r}: open it by its address.")
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
        if origin:
            is_own = origin.partition("://")[2] == host
        else:
            is_own = site == "same-origin" or "authorization" in request.headers
        if is_own:
            return False
        if origin or site != "none":
            raise PageError(403, _OTHER_PAGE)
        raise PageError(
            403,
            "A request that changes something must say where it comes from. A program sends an operator's key as "
            f"bearer token, or, if the run has no keys, the header `Origin: {request.url.scheme}://{host}`.",
        )

    def key(self, request: Request) -> str:
        """Return the key of the request's user; empty where the run has no keys. Raises `SignInError` where the user
        must sign in, `PageError` for a bearer token that is wrong, and as `_accepts`."""
        if not self._requires_key():
            return ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if not self._accepts(token.strip()):
                raise PageError(401, "This key is no operator's key of this run.")
            return token.strip()
        key, ends_at = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        if time.monotonic() >= ends_at or not self._accepts(key):
            raise SignInError(401, "Send an operator's key of this run as bearer token.")
        return key

    def sign_in(self, key: str, response: Response, secure: bool) -> None:
        """Open a session for `key` and put its cookie into `response`. Raises a 401 `PageError` for a wrong key, and as
        `_accepts`."""
        if not self._accepts(key):
            raise PageError(401, "This key is no operator's key of this run: `journeywork keys add --role operator`.")
        while len(self._sessions) >= _SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        name = secrets.token_urlsafe(32)
        self._sessions[name] = key, time.monotonic() + _SESSION_S
        response.set_cookie(COOKIE, name, max_age=int(_SESSION_S), httponly=True, samesite="strict", secure=secure)

    def sign_out(self, request: Request, response: Response) -> None:
        """Forget the session of a request, and its cookie."""
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)
        response.delete_cookie(COOKIE)
