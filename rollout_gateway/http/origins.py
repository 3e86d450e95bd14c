"""Checks of `Host` and `Origin`.

A web page can make a browser send requests to a gateway on the loopback interface, and the page's owner can point a
DNS name at 127.0.0.1 (DNS rebinding). So `Host` must hold one of the gateway's names, and requests of other web pages
are refused."""

from __future__ import annotations

from urllib.parse import urlsplit

from pipeline.config import ConfigError, GatewayConfig
from pipeline.running.ports import host_and_port
from pipeline.security.host_names import address_of, is_loopback, name_in_host
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.request import Request


class OriginPolicy:
    """Decides from a request's headers whether its origin is allowed. Raises `ConfigError` for invalid settings."""

    def __init__(self, config: GatewayConfig) -> None:
        self._loopback = is_loopback(config.host)
        self._names = {name.lower() for name in (*config.http.hosts, config.host)}
        self._public = config.public_url.rstrip("/")
        self._address = host_and_port(config.host, config.port)
        if self._public:
            url = urlsplit(self._public)
            if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
                raise ConfigError(
                    f"gateway.public_url: {config.public_url!r} must be a URL such as https://gateway.example.com"
                )
            self._names.add(url.hostname)
        if self._loopback:
            self._names.add("localhost")
        # A gateway not bound to loopback requires API keys, so it accepts any Host unless gateway.http.hosts is set.
        self._any_name = "*" in config.http.hosts or not (self._loopback or config.http.hosts)

    def check(self, request: Request) -> None:
        """Check the headers. Raises an `ApiError`: 400 if `Host` is invalid, 421 if it is not one of the gateway's
        names, 403 if the request comes from another web page."""
        headers = request.headers
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None:
            self._check_host(host)
        if origin is not None:
            # The scheme is not compared: TLS may end at a proxy, so the gateway does not know the scheme of its pages.
            if not host or origin.partition(b"://")[2] != host:
                raise _foreign_origin(f"web pages at {origin.decode('latin-1')[:200]!r}")
        elif headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and (
            request.method != "GET" or headers.get(b"sec-fetch-mode") != b"navigate"
        ):
            raise _foreign_origin("other web pages")

    def _check_host(self, host: bytes) -> None:
        """Raise a 400 `ApiError` for a `Host` that is none, and a 421 one for one that is not the gateway's."""
        text = host.decode("latin-1")
        name = name_in_host(text)
        if name is None:
            message = f"The Host {text[:200]!r} is invalid: send a name or address, and a port from 1 to 65535 or none."
            raise ApiError(400, "invalid_host", message)
        if not (self._any_name or name in self._names):
            address = address_of(name)
            # No DNS answer changes where a literal IP address leads. On loopback, only a loopback address is right.
            if address is None or (self._loopback and not address.is_loopback):
                message = f"This gateway does not serve the host name {name[:200]!r}: add it to gateway.http.hosts."
                raise ApiError(421, "unknown_host", message)

    def base_url(self, request: Request) -> str:
        """Return the start of the URL by which the client of a request reaches this gateway: `gateway.public_url`, else
        the request's `Host`, which HTTP/1.0 may lack, else the address of the settings."""
        return self._public or f"http://{request.headers.get(b'host', b'').decode('latin-1') or self._address}"


def _foreign_origin(source: str) -> ApiError:
    """Return the 403 for a request of another web page. `source`: whose requests are refused, for the message."""
    return ApiError(403, "foreign_origin", f"Requests of {source} are refused: the gateway serves programs only.")
