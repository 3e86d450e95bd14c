"""Checks of `Host`, `Origin` and the headers of proxies.

A web page can make a browser send requests to a gateway on the loopback interface, and the page's owner can point a
DNS name at 127.0.0.1 (DNS rebinding). So `Host` must hold one of the gateway's names, and requests from other web pages
are refused unless the settings name their origin."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from pipeline.config import ConfigError, GatewayConfig
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.request import Request

_KNOWN_HOSTS = 1024
"""Valid `Host` headers that are remembered."""
_AUTHORITY = re.compile(r"([A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_PAIR = re.compile(r'\s*([A-Za-z]+)\s*=\s*("[^"]*"|[^;,\s]*)\s*')

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_loopback(host: str) -> bool:
    """Whether a name or address is of the loopback interface."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class OriginPolicy:
    """Decides from a request's headers whether its origin is allowed. Raises `ConfigError` for invalid settings."""

    def __init__(self, config: GatewayConfig) -> None:
        self._loopback = is_loopback(config.host)
        self._names = {name.lower() for name in (*config.http.hosts, config.host)}
        self._public = config.public_url.rstrip("/")
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
        self._any_origin = "*" in config.http.cors_origins
        self._origins = {origin.encode() for origin in config.http.cors_origins}
        try:
            self._trusted: list[Network] = [ipaddress.ip_network(n) for n in config.http.trusted_proxies]
        except ValueError as error:
            raise ConfigError(f"gateway.http.trusted_proxies: {error}") from error
        self._known: set[bytes] = set()

    def check(self, request: Request) -> bool:
        """Check the headers. Returns whether this is a CORS preflight, which needs no key and is answered without a
        body.

        Raises an `ApiError`: 400 if `Host` is invalid, 421 if `Host` is not one of the gateway's names, 403 if the
        request comes from a web page that is not allowed."""
        headers = request.headers
        host = headers.get(b"host")
        if host is not None and host not in self._known:
            self._check_host(host)
        if b"origin" in headers:
            return self._check_origin(request, headers[b"origin"], host or b"")
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and (
            request.method != "GET" or headers.get(b"sec-fetch-mode") != b"navigate"
        ):
            raise _origin_refused("other web pages")
        return False

    def _check_host(self, host: bytes) -> None:
        authority = host.decode("latin-1")
        if not _is_authority(authority):
            raise ApiError(
                400,
                "invalid_host",
                f"The Host {authority[:200]!r} is invalid: send a name or address, and a port from 1 to 65535 or none.",
            )
        name = _name_of(authority)
        if not (self._any_name or name in self._names):
            address = _address(name)
            # A literal IP address cannot be rebound through DNS, so it is accepted.
            if address is None or (self._loopback and not address.is_loopback):
                raise ApiError(
                    421,
                    "unknown_host",
                    f"This gateway does not serve the host name {name[:200]!r}: add it to gateway.http.hosts.",
                )
        if len(self._known) < _KNOWN_HOSTS:
            self._known.add(host)

    def _check_origin(self, request: Request, origin: bytes, host: bytes) -> bool:
        """Allow or refuse a request by its `Origin` header; adds the CORS headers to the response.

        Returns whether it is a preflight. Raises a 403 `ApiError` if the origin is refused."""
        if self._any_origin or origin in self._origins:
            allow = (b"access-control-allow-origin", origin), (b"vary", b"Origin")
            requested_method = request.headers.get(b"access-control-request-method")
            if request.method == "OPTIONS" and requested_method is not None:
                requested_headers = request.headers.get(b"access-control-request-headers", b"")
                request.response_headers = (
                    *allow,
                    (b"access-control-allow-methods", b"GET, POST"),  # the only methods of the API
                    *(((b"access-control-allow-headers", requested_headers),) if requested_headers else ()),
                    # Browsers read this header only if a page of a public network calls a gateway in a private one.
                    (b"access-control-allow-private-network", b"true"),
                    (b"access-control-max-age", b"600"),
                )
                return True
            request.response_headers = (*allow, (b"access-control-expose-headers", b"retry-after"))
        # The scheme is not compared: TLS may end at a proxy, so the gateway does not know the scheme of its own pages.
        elif not host or origin.partition(b"://")[2] != host:
            raise _origin_refused(f"web pages at {origin.decode('latin-1')[:200]!r}")
        return False  # if the page is the gateway's own, browsers send no preflight

    # -- URLs ------------------------------------------------------------------------------------------------------

    def base_url(self, request: Request) -> str:
        """Return scheme and authority of the URL by which the client reached this gateway, as far as its headers
        say."""
        if self._public:
            return self._public
        scheme, host = "http", request.headers.get(b"host", b"").decode("latin-1") or request.server
        if self._trusts(request.peer):
            forwarded = _forwarded(request)
            if forwarded.get("proto", "").lower() in ("http", "https"):
                scheme = forwarded["proto"].lower()
            if _is_authority(forwarded.get("host", "")):
                host = forwarded["host"]
        return f"{scheme}://{host}"

    def _trusts(self, peer: str) -> bool:
        address = _address(peer)
        return address is not None and any(address in network for network in self._trusted)


def _forwarded(request: Request) -> dict[str, str]:
    """Return `proto` and `host` as the first proxy saw them, from `Forwarded` (RFC 7239) or else the `X-Forwarded-`
    headers."""
    headers = request.headers
    if b"forwarded" in headers:
        first = headers[b"forwarded"].decode("latin-1").partition(",")[0]
        return {name.lower(): value.strip('"') for name, value in _PAIR.findall(first)}
    values = {name: headers.get(b"x-forwarded-" + name.encode(), b"") for name in ("proto", "host")}
    return {name: value.decode("latin-1").partition(",")[0].strip() for name, value in values.items()}


def _origin_refused(source: str) -> ApiError:
    return ApiError(
        403,
        "foreign_origin",
        f"Requests from {source} are not allowed. To allow them, add that origin to gateway.http.cors_origins.",
    )


def _name_of(authority: str) -> str:
    """Return the name or address in a `Host` header, without port and brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower().removesuffix(".")


def _is_authority(text: str) -> bool:
    """Whether `text` is `name` or `name:port`, where the name may be an address. Anything else could change the URL
    that it is put into."""
    authority = _AUTHORITY.fullmatch(text)
    if authority is None or (authority[2] is not None and not 1 <= int(authority[2]) <= 65535):
        return False
    return not text.startswith("[") or _address(authority[1][1:-1]) is not None


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
